"""The command ``ring-attn compare`` and its options."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ring_attn_core.layouts import LAYOUTS

from ..error_reporting import errors_in_one_line

ONE_OR_SEVERAL = "one value, or several with commas between them"

SEVERAL: dict[str, Any] = dict.fromkeys(("ranks", "length", "heads", "head_dim", "segments", "dilations"), int)
SEVERAL |= dict.fromkeys(("dtype", "layout", "backend"), str)
"""Options that take values with commas between them, and the type of a value."""
OUTPUT = "variants", "variant", "json", "png", "leak", "bibtex"
"""Options that ``make_sweep`` does not take."""


def compare(
    context: typer.Context,
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of variants; or all; or your own module:function, for one framework with jax: or torch: before it."
        ),
    ] = None,
    variant: Annotated[list[str] | None, typer.Option(help="A variant, as in the arguments; may be repeated.")] = None,
    ranks: Annotated[str, typer.Option(help=f"Number of ranks; {ONE_OR_SEVERAL}.")] = "2",
    length: Annotated[str, typer.Option(help=f"Number of tokens in the sequence; {ONE_OR_SEVERAL}.")] = "512",
    heads: Annotated[str, typer.Option(help=f"Number of query heads; {ONE_OR_SEVERAL}.")] = "4",
    kv_heads: Annotated[int, typer.Option(help="Number of key heads, which divides the number of query heads.")] = 2,
    head_dim: Annotated[str, typer.Option(help=f"Width of a head; {ONE_OR_SEVERAL}.")] = "32",
    batch: Annotated[int, typer.Option(help="Number of rows in the batch.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"float32, bfloat16, float16, float64; {ONE_OR_SEVERAL}.")] = "float32",
    layout: Annotated[str, typer.Option(help=f"{', '.join(LAYOUTS)}; {ONE_OR_SEVERAL}.")] = "zigzag",
    mask: Annotated[str, typer.Option(help="causal[:offset], full, window:before, sliding_window:before:after.")] = "causal",
    backend: Annotated[str, typer.Option(help=f"Backend of ring_attention; {ONE_OR_SEVERAL}.")] = "auto",
    strategy: Annotated[str, typer.Option(help="Strategy of ring_attention.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or gpu: with gpu each rank needs its own.")] = "cpu",
    scale: Annotated[float | None, typer.Option(help="Factor of q . k in a score.", show_default="head_dim ** -0.5")] = None,
    softcap: Annotated[float | None, typer.Option(help="Replace each score by softcap * tanh(score / softcap).")] = None,
    sinks: Annotated[
        bool, typer.Option("--sinks", help="Add a random sink for each head: a logit in the softmax's denominator.")
    ] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="Add ALiBi's biases.")] = False,
    dropout_rate: Annotated[float, typer.Option(help="Share of attention's probabilities to drop.")] = 0.0,
    key_mask: Annotated[bool, typer.Option("--key-mask", help="Mask a random fifth of the keys.")] = False,
    documents: Annotated[int, typer.Option(help="Number of packed documents in a row, of random lengths; 0 for none.")] = 0,
    segments: Annotated[str, typer.Option(help="For dilated attention: segment lengths, in tokens.")] = "64,128",
    dilations: Annotated[str, typer.Option(help="For dilated attention: a dilation for each segment length.")] = "1,2",
    mixing: Annotated[str, typer.Option(help="For dilated attention: how patterns are mixed, softmax or heads.")] = "softmax",
    block: Annotated[int, typer.Option(help="For summary attention: tokens of a block.")] = 64,
    summaries: Annotated[int, typer.Option(help="For summary attention: summaries of a block.")] = 4,
    window: Annotated[
        int, typer.Option(help="For summary attention: number of previous tokens that a query sees exactly.")
    ] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    repeats: Annotated[int, typer.Option(help="Timed runs of each variant; variants take turns.")] = 5,
    framework: Annotated[str, typer.Option(help="jax, torch, or both: jax,torch.")] = "jax,torch",
    patience: Annotated[float, typer.Option(help="Seconds to wait for a rank's answer before the command fails.")] = 300.0,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw errors and times to this file, a .png or .svg.")] = None,
    leak: Annotated[
        bool, typer.Option("--leak", help="Change one token at a time, and name what moves although the mask hides it.")
    ] = False,
    bibtex: Annotated[bool, typer.Option("--bibtex", hidden=True)] = False,
) -> None:
    """Compare attention variants of JAX and PyTorch to a float64 reference and to each other.

    Exit with status 1 if an error exceeds its bound.
    """
    with errors_in_one_line():
        from ..processes import Failure
        from . import check_files, write
        from .comparison import compare as run
        from .leaks import probe
        from .report import draw, width_of
        from .sweep import make_sweep

        if bibtex:
            raise ValueError("--bibtex is gone: pass --json FILE, whose command, versions and commit you can cite")
        others = {name: value for name, value in context.params.items() if name not in OUTPUT}
        arguments: dict[str, Any] = {
            name: _parse_list(name, x, SEVERAL[name]) if name in SEVERAL else x for name, x in others.items()
        }
        sweep = make_sweep([*(variants or []), *(variant or [])], **arguments)
        check_files(json, png)
        if leak and (json or png):
            raise ValueError("--leak prints what leaks and measures nothing: leave out --json and --png")
        stderr = Console(stderr=True, highlight=False)
        with stderr.status("") as status:
            tell = status.update if stderr.is_terminal else stderr.print
            try:
                comparison = probe(sweep, tell) if leak else run(sweep, tell)
            except Failure as failure:
                raise ValueError(str(failure)) from None
        if isinstance(comparison, tuple):
            typer.echo("\n".join(map(str, comparison)))
            raise typer.Exit(int(any(each.leaks for each in comparison)))
        write(comparison, json, png)
    width = width_of(shutil.get_terminal_size((140, 24)).columns)  # 140 columns if stdout is not a terminal
    Console(width=width, highlight=False, markup=False).print(draw(comparison, width))
    for path in (json, png):
        if path is not None:
            typer.echo(f"wrote {path}")
    raise typer.Exit(0 if comparison.passed else 1)


def _parse_list(name: str, text: str, kind: type) -> tuple[Any, ...]:
    """Convert the comma-separated values of option ``name`` to the type ``kind``. Raise ValueError if one cannot be converted."""
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')} takes numbers with commas between them, got {text!r}") from None
