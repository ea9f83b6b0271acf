"""The command ``ring-attn doctor`` and its options."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer
from rich.console import Console

from ..error_reporting import errors_in_one_line

DTYPE, HEAD_DIM = "bfloat16", 128


def doctor(
    dtype: Annotated[str, typer.Option(help="Dtype of q, k and v.")] = DTYPE,
    head_dim: Annotated[int, typer.Option(help="Head size of q and k.")] = HEAD_DIM,
    v_dim: Annotated[int | None, typer.Option(help="Head size of v.", show_default="head_dim")] = None,
    framework: Annotated[str, typer.Option(help="both, jax or torch.")] = "both",
    measure: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
    model: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the versions, the devices, and for each backend whether it runs on this machine or why it does not."""
    with errors_in_one_line():
        if measure:
            raise ValueError(
                '--measure is gone: strategy="auto" no longer reads measurements, and ring-attn plan --gpus takes its numbers '
                "from a table of GPUs"
            )
        if model is not None:
            raise ValueError(
                "--model is gone: in a clone of the repository run python -m benchmarks.hugging_face.tested_models"
                f"{'' if model == 'all' else f' --classes {model}'}"
            )
        console = Console(width=shutil.get_terminal_size().columns, highlight=False, markup=False)
        from . import findings, report, typical

        problem = typical(dtype, head_dim, v_dim)
        console.print(report(problem, findings(problem, framework)))
