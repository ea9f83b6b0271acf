"""How much memory does attention need beside what it is given and what it returns?

    python -m benchmarks.memory [--tokens 65536] [--mask sliding_window:2047]

Forward and backward of one rank on a CPU, float32, 2 heads of 64: the peak of resident memory above imports, over the bytes of q,
k, v, out and their four gradients. In addition, the temporary memory that XLA allocates for the JAX ring on each rank, for more
ranks at a fixed shard.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from typing import Any

from ..support import harness, report
from .cell import DIM, FRAMEWORKS, HEADS, MOST, RANKS, peak_ratio, shard_bytes, temp_bytes


def main() -> None:
    options = harness.options(__doc__, tokens=65536, mask="causal")  # a window needs as much memory, quickly
    ratios = {framework: round(peak_ratio(framework, options.tokens, options.mask), 3) for framework in FRAMEWORKS}
    for framework, ratio in ratios.items():
        print(f"{framework:6} {options.tokens:,} tokens: peak {ratio:.2f} x the eight arrays, aimed at {MOST} x")
    growth = [growth_row(in_order) for in_order in (False, True)]
    for row in growth:
        print(f"JAX ring of {RANKS} ranks, {row['schedule']}: shards {row['forward']} forward, {row['both']} with backward")
    problem = {"batch": 1, "heads": HEADS, "dim": DIM, "dtype": "float32", "tokens": options.tokens, "mask": options.mask}
    found = {"peak_over_eight_arrays": ratios, "at_most": MOST, "compiled_shards_set_aside": growth}
    print(f"written: {report.save('memory', harness.result_of(__doc__, problem=problem) | found)}")


def growth_row(in_order: bool, seq_local: int = 512) -> dict[str, Any]:
    """Return the temporary memory that XLA allocates at RANKS, in shards of packed k/v."""
    found = temp_bytes(RANKS, seq_local, in_order=in_order)
    shards = {passes: [round(row[passes] / shard_bytes(seq_local), 2) for row in found] for passes in ("forward", "both")}
    schedule = "in order of least memory" if in_order else "XLA's default"
    return {"schedule": schedule, "ranks": RANKS, "seq_local": seq_local, **shards}


if __name__ == "__main__":
    main()
