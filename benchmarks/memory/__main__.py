"""How much memory does attention need beside what it is given and what it returns?

    python -m benchmarks.memory [--tokens 65536] [--mask sliding_window:2047]

Forward and backward of one rank on a CPU, float32, 2 heads of 64: the peak of resident memory above imports, over the bytes of q,
k, v, out and their four gradients. In addition, the temporary memory that XLA allocates for the JAX ring on each rank, for more
ranks at a fixed shard.

Prediction:
  PyTorch: at its end the backward holds q, k, v, out, dout (5 arrays of 8), dq (1), dk and dv as one array and as the two that
  become .grad (4), 10/8 = 1.25; packed k/v is freed by then. JAX: q, k, v, dout, out, dq, dk, dv (8), packed k/v (2) and their
  gradient before it is split (2), 12/8 = 1.5, and XLA may copy a loop's carry. Tiles add 10 MiB. In the ring a rank holds the
  current k/v and the next, for any number of ranks: no growth.

Measured:
  At 65,536 tokens under a window of 2,048, which has the same arrays: PyTorch 1.38, JAX 1.58. PyTorch's extra 1/8 is a copy of
  dout with the rows of fully masked queries set to 0.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..support import report
from .cell import DIM, FRAMEWORKS, HEADS, MOST, RANKS, peak_ratio, shard_bytes, temp_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--mask", default="causal", help="as masks.parse reads it; a window needs as much memory, quickly")
    options = parser.parse_args()
    ratios = {framework: round(peak_ratio(framework, options.tokens, options.mask), 3) for framework in FRAMEWORKS}
    for framework, ratio in ratios.items():
        print(f"{framework:6} {options.tokens:,} tokens: peak {ratio:.2f} x the eight arrays, aimed at {MOST} x")
    growth = [growth_row(in_order) for in_order in (False, True)]
    for row in growth:
        print(f"JAX ring of {RANKS} ranks, {row['schedule']}: shards {row['forward']} forward, {row['both']} with backward")
    print(f"written: {report.save('memory', _result(options, ratios, growth))}")


def growth_row(in_order: bool, seq_local: int = 512) -> dict[str, Any]:
    """Return the temporary memory that XLA allocates at RANKS, in shards of packed k/v."""
    found = temp_bytes(RANKS, seq_local, in_order=in_order)
    shards = {passes: [round(row[passes] / shard_bytes(seq_local), 2) for row in found] for passes in ("forward", "both")}
    schedule = "in order of least memory" if in_order else "XLA's default"
    return {"schedule": schedule, "ranks": RANKS, "seq_local": seq_local, **shards}


def _result(options: argparse.Namespace, ratios: dict[str, float], growth: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "question": report.first_line(__doc__),
        **report.environment(),
        "problem": {"batch": 1, "heads": HEADS, "dim": DIM, "dtype": "float32", "tokens": options.tokens, "mask": options.mask},
        "prediction": report.section(__doc__, "Prediction"),
        "notes": report.section(__doc__, "Measured"),
        "peak_over_eight_arrays": ratios,
        "at_most": MOST,
        "compiled_shards_set_aside": growth,
    }


if __name__ == "__main__":
    main()
