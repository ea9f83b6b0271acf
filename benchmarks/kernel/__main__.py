"""How fast are the kernels on one GPU, in both frameworks, against what the field runs, and what does each feature cost?

    python -m benchmarks.kernel [--part cases features]
    python -m benchmarks.kernel.plot                        draws the stored result: TFLOP/s by length

bfloat16, random normal, through the public functions: PyTorch eager, JAX jitted. First, each candidate's out and gradients are
checked against float64 at 1,024 tokens. The candidates of a case take turns in one process (support/turns.py); the median of the
rounds counts. TFLOP/s count the visible pairs only, a backward as 2.5 forwards. The cost of a feature is measured for each of our
backends, as its time with the feature over its time without.

Prediction (H200, causal, 16 heads of 128, 16,384 tokens; forward 1.1 TFLOP, backward 2.75):
  The tensor cores reach 790 TFLOP/s in short bursts, so 1.4 ms; reading k and v once per query tile, 1.1 GB from L2, overlaps. A
  tile of 128 x 128 takes 2,048 cycles of products, 1,024 of exp2 (16 per cycle) and about 1,000 of issue. Triton's loop does not
  overlap the softmax of a warpgroup with its own products, and two warpgroups overlap by chance: between 2,048 and 4,100 cycles
  per tile, 500 TFLOP/s at 3,600. The deterministic backward does 7 products for 5 counted, so it starts from 5/7 of such a rate,
  360.

Measured:
  results/kernel-h200.json has Hopper's own kernels under "auto" (kernels/hopper/README.md has their roofline and the experiments)
  and the portable ones by name. The portable forward takes 3,550 cycles per tile, as predicted: the gap to FlashAttention-4 is
  softmax that is not overlapped. Gains: a 2-D descriptor for q (a 4-D one puts q into registers, and the loop spills), ranges of
  key tiles by scalar arithmetic instead of reductions (+2 %), and zeroing v in edge tiles only if needed (+3 %). Computing the
  next scores before this softmax, by hand, lost 10 %, because Triton waits for both products at once. Expensive features are
  softcap (a tanh per score; by a polynomial if it is small, forward 41 -> 32 %), a random key mask (a padding mask skips whole
  tiles), and dropout (a Philox counter takes 21 instructions and serves 8 scores, 4 in the pass for dk and dv). If the softmax is
  overlapped, as on Hopper, their whole cost shows.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..support import report
from .candidates import CANDIDATES
from .parts import MEASURED, OTHERS, PASSES, measure


def show(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="TFLOP/s", title_justify="left")
    for column in ("case", "candidate", *PASSES):
        table.add_column(column, justify="left" if column in ("case", "candidate") else "right")
    for cell in cells:
        table.add_row(
            cell["case"],
            cell["candidate"],
            *(f"{cell[p]['tflops']:.0f}" if p in cell else cell.get("left_out", "") for p in PASSES),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--part", nargs="*", choices=[*MEASURED, *OTHERS], default=[*MEASURED, *OTHERS])
    parser.add_argument("--out", default="kernel-h200", help="name of the result file")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment()}
    result["hardware"] = {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
    for part in arguments.part:
        if part in MEASURED:
            result[part] = [cell for case in MEASURED[part] for cell in measure(case, CANDIDATES, arguments.rounds)]
            Console(width=150).print(show(result[part]))
        else:
            result[part] = OTHERS[part](arguments.rounds)
            Console(width=150).print(result[part])
        torch.cuda.empty_cache()
        path = report.save(arguments.out, result)
    print(path)


if __name__ == "__main__":
    main()
