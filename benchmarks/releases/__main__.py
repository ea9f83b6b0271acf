"""Are the kernels as fast with every release of Triton, in both frameworks?

Each release of Triton compiles the same source to other code, with another speed. A process has one Triton, so run this once per
release; each run adds its column to the result. cuDNN, which does not use Triton, takes turns with our kernels, and ratios to
cuDNN are compared. `--table` prints the stored results.

    python -m benchmarks.releases                                     the installed release
    PYTHONPATH=folder/of/another/triton python -m benchmarks.releases

Prediction: within 1 % everywhere. Instructions of a step without a mask, with Triton 3.6 / 3.7 / 3.8 / 3.9: forward, heads of 128
463 / 463 / 467 / 466, of 64 427 / 427 / 428 / 428; backward 395 / 395 / 395 / 395 and 556 / 556 / 564 / 564. Only the backward of
heads of 64 reloads registers in a step, three with 3.6 and 3.7. All are bound by products and shared memory, and issue in 20 to
45 % of the cycles.

Measured: results/releases-h200.json. The same kernel twice in one process differs by 0.5 %, cuDNN from process to process by 2 %.
In turns in one process, in which 3.6 launches the binaries of 3.8 and 3.9: forward, heads of 128 full 0.988 and 0.976 of 3.6's,
causal 1.000 and 0.999, 4,096 tokens 1.003 and 1.004, heads of 64 1.006 and 1.005; backward 1.005 and 1.006.

Intermediate measurements, over 3.6's in one process: forward with 3.9 and rows reduced by pairs 0.97 (full), 0.99 (causal), 0.97
(heads of 64); with CUDA 13.4's assembler instead of 12.9's 0.97, 0.99, 0.99, and 0.98 at 4,096 tokens. The earlier backward with
3.9, 0.71; with 3.6, over itself with addresses computed at their use, 0.995, heads of 64 0.954.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from ..kernel.parts import CASES, FRAMEWORKS, PASSES, measure
from ..support import report
from ..support.turns import device_seconds, take_turns

RESULT = "releases-h200"
YARDSTICK = "cuDNN"
NAMES = "ring_attn_torch", "ring_attn_jax", "ring_attn_torch, triton", YARDSTICK
OLDEST = "3.6"


def of_this_release(rounds: int) -> dict[str, Any]:
    """Return for each case and pass the TFLOP/s, their ratios to cuDNN's, and the device time in JAX over that in PyTorch."""
    cells = []
    for case in CASES:
        measured = {cell["candidate"]: cell for cell in measure(case, NAMES, rounds)}
        works = {name: ours(case) for name, ours in FRAMEWORKS.items()}
        for index, passes in enumerate(PASSES):
            times = take_turns({name: work[1 + index] for name, work in works.items()}, max(rounds // 2, 1), device_seconds)
            cell: dict[str, Any] = {"case": str(case), "pass": passes}
            cell["tflops"] = {name: measured[name][passes]["tflops"] for name in NAMES}
            cell["of_cudnn"] = {name: round(cell["tflops"][name] / cell["tflops"][YARDSTICK], 4) for name in NAMES[:-1]}
            cell["jax_over_torch_on_device"] = round(times["jax"] / times["torch"], 4)
            cells.append(cell)
        torch.cuda.empty_cache()
    return {**report.environment(), "cells": cells}


def table(releases: dict[str, Any]) -> Table:
    """Return a table of TFLOP/s and, in brackets, the ratio to cuDNN over that of the oldest release."""
    made = Table(title="TFLOP/s, (of cuDNN, over 3.6's), JAX's time on the device over PyTorch's", title_justify="left")
    for column in ("case", "pass", "candidate", *sorted(releases)):
        made.add_column(column)
    for index, cell in enumerate(releases[OLDEST]["cells"]):
        for name in NAMES[:-1]:
            row = []
            for release in sorted(releases):
                other = releases[release]["cells"][index]
                ratio = other["of_cudnn"][name] / cell["of_cudnn"][name]
                more = f" {other['jax_over_torch_on_device']:.3f}" if name == "ring_attn_jax" else ""
                row.append(f"{other['tflops'][name]:.0f} ({ratio:.3f}){more}")
            made.add_row(cell["case"], cell["pass"], name, *row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--table", action="store_true", help="measure nothing, print what is there")
    parser.add_argument("--out", default=RESULT, help="name of the result file")
    arguments = parser.parse_args()
    result = report.load(arguments.out) or {"question": report.first_line(__doc__), "releases": {}}
    if not arguments.table:
        release = ".".join(triton.__version__.split(".")[:2])
        result["hardware"] = {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
        result["releases"][release] = of_this_release(arguments.rounds)
        print(report.save(arguments.out, result))
    if OLDEST in result["releases"]:
        Console(width=180).print(table(result["releases"]))


if __name__ == "__main__":
    main()
