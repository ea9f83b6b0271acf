"""How much memory does attention need beside what it is given and what it returns?

Forward and backward of one rank on a CPU, float32, 2 heads of 64: the peak of resident memory above imports, over the bytes of q,
k, v, out and their four gradients. And what XLA sets aside for the JAX ring on every rank, as ranks join at a fixed shard.

Prediction:
  PyTorch: at its last moment the backward holds q, k, v, out, dout (5 arrays of 8), dq (1), dk and dv as one array and as the two
  that become .grad (4), 10/8 = 1.25; packed k/v is gone by then. JAX: q, k, v, dout, out, dq, dk, dv (8), packed k/v (2) and
  their gradient before it is split (2), 12/8 = 1.5, and XLA may copy what a loop carries. Tiles add 10 MiB. In the ring a rank
  holds the k/v it works on and the next, whatever the number of ranks: no growth.

Measured at 65,536 tokens under a window of 2,048, which has the same arrays: PyTorch 1.38, JAX 1.58. PyTorch's extra 1/8 is dout,
copied with the rows that see nothing cleared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import report
from .memory_cell import DIM, HEADS
from .process import run_fresh

CELL = "benchmarks.memory_cell"
FRAMEWORKS = ("torch", "jax")
MOST = 1.75
"""What the peak may be of the eight arrays' bytes."""
RANKS = (2, 4, 8)


def peak_ratio(framework: str, tokens: int, mask: str = "causal") -> float:
    """Peak resident memory of forward and backward above imports, over the eight arrays' bytes. ``mask``: see masks.parse."""
    peak = run_fresh(CELL, {"what": framework, "tokens": tokens, "mask": mask})[0]
    return peak / (8 * tokens * HEADS * DIM * 4)


def temp_bytes(ranks: Sequence[int], seq_local: int, mask: str = "causal", in_order: bool = False) -> list[dict[str, int]]:
    """What XLA sets aside on every rank of the JAX ring, ``seq_local`` tokens a rank: {"forward": bytes, "both": bytes} for each
    number of ranks. ``in_order``: scheduled to need little memory, not to run many operations at once, XLA's default on a CPU.
    """
    flags = f"--xla_force_host_platform_device_count={max(ranks)}"
    if in_order:
        flags += " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    task = {"what": "compiled", "ranks": ranks, "seq_local": seq_local, "mask": mask}
    return run_fresh(CELL, task, environment={"XLA_FLAGS": flags})[0]


def shard_bytes(seq_local: int) -> int:
    """Bytes of one rank's packed k/v."""
    return seq_local * HEADS * 2 * DIM * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=report.first_line(__doc__))
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
    """What XLA sets aside at RANKS, in shards of packed k/v."""
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
