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
    measure: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
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

    With --model, test for each chosen class of transformers whether a tiny model gives on a ring the results of eager attention.
    """
    with errors_in_one_line():
        if measure:
            raise ValueError(
                '--measure is gone: strategy="auto" no longer reads measurements, and ring-attn plan --gpus takes its numbers '
                "from a table of GPUs"
            )
        shape = {"--dtype": dtype != DTYPE, "--head-dim": head_dim != HEAD_DIM, "--v-dim": v_dim}
        only_without = [name for name, passed in (shape | {"--framework": framework != "both"}).items() if passed]
        only_with = [
            name for name, value in (("--json", json_file), ("--table", table), ("--seconds", seconds)) if value is not None
        ]
        if model is not None and only_without:
            raise ValueError(f"{', '.join(only_without)} would change nothing with --model: leave out one of them")
        if model is None and only_with:
            raise ValueError(
                f"{', '.join(only_with)} without --model would change nothing: add --model, or leave out {only_with[0]}"
            )
        console = Console(width=shutil.get_terminal_size().columns, highlight=False, markup=False)
        if model is not None:
            from . import models

            models.run(model, 120.0 if seconds is None else seconds, console, json_file, table)
            return
        from . import findings, report, typical

        problem = typical(dtype, head_dim, v_dim)
        console.print(report(problem, findings(problem, framework)))
