"""The command ``ring-attn doctor`` and its options."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer
from rich.console import Console

from ..error_reporting import errors_in_one_line


def doctor(
    dtype: Annotated[str, typer.Option(help="Of q, k and v.")] = "bfloat16",
    head_dim: Annotated[int, typer.Option(help="Of q and k.")] = 128,
    v_dim: Annotated[int | None, typer.Option(help="Of v.", show_default="head_dim")] = None,
    framework: Annotated[str, typer.Option(help="both, jax or torch.")] = "both",
    measure: Annotated[
        bool, typer.Option("--measure", help='Measure this machine, and save the record by which "auto" chooses a strategy.')
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(help="With --measure: ranks of the ring.", show_default="all GPUs, or 2 on CPUs")
    ] = None,
    network: Annotated[float, typer.Option(help="With --measure: GB/s of a rank to another host, which is not measured.")] = 45.0,
) -> None:
    """Print versions, devices, and for each backend whether it runs on this machine or why not."""
    with errors_in_one_line():
        console = Console(width=shutil.get_terminal_size().columns, highlight=False, markup=False)
        if measure:
            from .measure import run

            run(framework, ranks, network, console)
            return
        from . import findings, report, typical

        problem = typical(dtype, head_dim, v_dim)
        console.print(report(problem, findings(problem, framework)))
