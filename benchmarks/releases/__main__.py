"""Are the kernels as fast with every release of Triton, in both frameworks?

Each release of Triton compiles the same source to other code, with another speed. A process has one Triton, so run this once per
release; each run adds its column to the result. cuDNN, which does not use Triton, takes turns with our kernels, and ratios to
cuDNN are compared. `--table` prints the stored results.

    python -m benchmarks.releases                                     the installed release
    PYTHONPATH=folder/of/another/triton python -m benchmarks.releases

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from ..kernel.parts import CASES, FRAMEWORKS, PASSES, measure
from ..support import harness, report
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


if __name__ == "__main__":  # table: measure nothing, print what is there
    options = harness.options(__doc__, rounds=9, table=False, out=RESULT)
    result = report.load(options.out) or {"question": report.first_line(__doc__), "releases": {}}
    if not options.table:
        result["hardware"] = {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
        result["releases"][".".join(triton.__version__.split(".")[:2])] = of_this_release(options.rounds)
        print(report.save(options.out, result))
    if OLDEST in result["releases"]:
        Console(width=180).print(table(result["releases"]))
