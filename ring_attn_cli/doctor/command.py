"""The command ``ring-attn doctor`` and its options."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..error_reporting import errors_in_one_line

DTYPE, HEAD_DIM = "bfloat16", 128
"""The default dtype and head dim of the problem that the report is about."""


def doctor(
    dtype: Annotated[str, typer.Option(help="Dtype of q, k and v.")] = DTYPE,
    head_dim: Annotated[int, typer.Option(help="Head size of q and k.")] = HEAD_DIM,
    v_dim: Annotated[int | None, typer.Option(help="Head size of v.", show_default="head_dim")] = None,
    framework: Annotated[str, typer.Option(help="both, jax or torch.")] = "both",
    measure: Annotated[
        bool, typer.Option("--measure", help='Measure this machine and save the record from which strategy="auto" chooses.')
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(help="With --measure: number of ranks.", show_default="all GPUs, or 2 on CPUs")
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(help="With --measure: GB/s from a rank to another host, which one host cannot measure.", show_default="45"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Compare a tiny model of this class of transformers (or of each class: all) on a ring with eager attention."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="With --model: write the verdicts to this file.")] = None,
    table: Annotated[Path | None, typer.Option(help="With --model: write the verdicts to this Markdown file.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="With --model: time limit of a class, in seconds.", show_default="120")
    ] = None,
) -> None:
    """Print the versions, the devices, and for each backend whether it runs on this machine or why it does not.

    With --measure, measure the speed of this machine. With --model, test for each chosen class of transformers whether a tiny
    model gives on a ring the results of eager attention.
    """
    with errors_in_one_line():
        if measure and model is not None:
            raise ValueError("--measure and --model are two questions: pass one of them")
        _check_unused("--measure", measure, {"--dtype": dtype != DTYPE, "--head-dim": head_dim != HEAD_DIM, "--v-dim": v_dim})
        _check_unused(
            "--model",
            model is not None,
            {"--dtype": dtype != DTYPE, "--head-dim": head_dim != HEAD_DIM, "--v-dim": v_dim, "--framework": framework != "both"},
        )
        _check_needed("--measure", measure, {"--ranks": ranks, "--network": network})
        _check_needed("--model", model is not None, {"--json": json_file, "--table": table, "--seconds": seconds})
        console = Console(width=shutil.get_terminal_size().columns, highlight=False, markup=False)
        if model is not None:
            from . import models

            models.run(model, 120.0 if seconds is None else seconds, console, json_file, table)
            return
        if measure:
            from .measure import run

            run(framework, ranks, 45.0 if network is None else network, console)
            return
        from . import findings, report, typical

        problem = typical(dtype, head_dim, v_dim)
        console.print(report(problem, findings(problem, framework)))


def _check_unused(option: str, used: bool, others: dict[str, object]) -> None:
    """Raise ValueError if ``option`` is used and an option in ``others`` is passed too. The latter would have no effect."""
    if used and (ignored := [name for name, value in others.items() if value]):
        raise ValueError(f"{', '.join(ignored)} would change nothing with {option}: leave out one of them")


def _check_needed(option: str, given: bool, others: dict[str, object]) -> None:
    """Raise ValueError if one of the options ``others`` is passed without ``option``, on which they depend."""
    unused = [name for name, value in others.items() if value is not None]
    if unused and not given:
        raise ValueError(f"{', '.join(unused)} without {option} would change nothing: add {option}, or leave out {unused[0]}")
