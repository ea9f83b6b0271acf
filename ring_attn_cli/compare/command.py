"""The command ``ring-attn compare`` and its options."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..error_reporting import errors_in_one_line

Several = "one value, or several with commas between them"


def compare(
    variants: Annotated[
        list[str] | None,
        typer.Argument(help="Names, all, or module:function of your own, with jax: or torch: before it for one framework."),
    ] = None,
    variant: Annotated[list[str] | None, typer.Option(help="The same as an argument, as often as you like.")] = None,
    ranks: Annotated[str, typer.Option(help=f"Members of the ring; {Several}.")] = "2",
    length: Annotated[str, typer.Option(help=f"Tokens of the sequence; {Several}.")] = "512",
    heads: Annotated[str, typer.Option(help=f"Query heads; {Several}.")] = "4",
    kv_heads: Annotated[int, typer.Option(help="Key heads; they divide the query heads.")] = 2,
    head_dim: Annotated[str, typer.Option(help=f"Width of a head; {Several}.")] = "32",
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"float32, bfloat16, float16, float64; {Several}.")] = "float32",
    layout: Annotated[str, typer.Option(help=f"zigzag, striped, contiguous; {Several}.")] = "zigzag",
    mask: Annotated[str, typer.Option(help="causal[:offset], full, window:before, sliding_window:before:after.")] = "causal",
    backend: Annotated[str, typer.Option(help=f"As of ring_attention; {Several}.")] = "auto",
    strategy: Annotated[str, typer.Option(help="As of ring_attention.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or gpu; a rank has a GPU of its own.")] = "cpu",
    scale: Annotated[float | None, typer.Option(help="Of q . k.", show_default="head_dim ** -0.5")] = None,
    softcap: Annotated[float | None, typer.Option(help="Scores become softcap tanh(score / softcap).")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="A logit a head in the denominator, drawn at random.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi's slopes.")] = False,
    dropout_rate: Annotated[float, typer.Option(help="Share of the probabilities that is dropped.")] = 0.0,
    key_mask: Annotated[bool, typer.Option("--key-mask", help="A fifth of the keys is hidden at random.")] = False,
    documents: Annotated[int, typer.Option(help="Packed documents in a row, of random lengths; 0 for none.")] = 0,
    segments: Annotated[str, typer.Option(help="Of dilated attention, in tokens.")] = "64,128",
    dilations: Annotated[str, typer.Option(help="Of dilated attention, one a segment length.")] = "1,2",
    mixing: Annotated[str, typer.Option(help="Of dilated attention: softmax or heads.")] = "softmax",
    block: Annotated[int, typer.Option(help="Of summary attention: tokens of a block.")] = 64,
    summaries: Annotated[int, typer.Option(help="Of summary attention: summaries of a block.")] = 4,
    window: Annotated[int, typer.Option(help="Of summary attention: tokens that are seen exactly.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    repeats: Annotated[int, typer.Option(help="Runs that are timed, in turns.")] = 5,
    framework: Annotated[str, typer.Option(help="jax, torch, or both.")] = "jax,torch",
    patience: Annotated[float, typer.Option(help="Seconds without an answer after which everything is ended.")] = 300.0,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw error and time, as .png or .svg.")] = None,
    bibtex: Annotated[bool, typer.Option("--bibtex", help="Print an entry to cite, with versions.")] = False,
) -> None:
    """Compare attention variants in JAX and PyTorch with float64 and with each other. Exit with status 1 if a bound is missed."""
    lists = {"length": (length, int), "heads": (heads, int), "head_dim": (head_dim, int)}
    lists |= {"dtype": (dtype, str), "layout": (layout, str), "backend": (backend, str)}
    lists |= {"segments": (segments, int), "dilations": (dilations, int)}
    of_case = {"kv_heads": kv_heads, "batch": batch, "mask": mask, "strategy": strategy, "device": device, "scale": scale}
    of_case |= {"softcap": softcap, "sinks": sinks, "alibi": alibi, "dropout_rate": dropout_rate, "key_mask": key_mask}
    of_case |= {"documents": documents, "mixing": mixing, "block": block, "summaries": summaries, "window": window, "seed": seed}
    with errors_in_one_line():
        from ..processes import Failure
        from . import check_files, written
        from .comparison import compare as found
        from .export import bibtex as entry
        from .report import table, width_of
        from .sweep import sweep_of

        listed = {name: _listed(name, text, kind) for name, (text, kind) in lists.items()}
        names = [*(variants or []), *(variant or [])]
        sweep = sweep_of(names, _listed("ranks", ranks, int), framework, repeats, patience, **of_case, **listed)
        check_files(json, png)
        stderr = Console(stderr=True, highlight=False)
        with stderr.status("") as status:
            try:
                comparison = found(sweep, status.update if stderr.is_terminal else stderr.print)
            except Failure as failure:
                raise ValueError(str(failure)) from None
        written(comparison, json, png)
    width = width_of(shutil.get_terminal_size((140, 24)).columns)  # 140 columns if stdout is not a terminal
    Console(width=width, highlight=False, markup=False).print(table(comparison, width))
    for path in (json, png):
        if path is not None:
            typer.echo(f"wrote {path}")
    if bibtex:
        typer.echo(entry(comparison))
    raise typer.Exit(0 if comparison.passed else 1)


def _listed(name: str, text: str, kind: type) -> tuple[Any, ...]:
    """Parse the comma-separated values of an option. Raise ValueError if one is not a ``kind``."""
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')} takes numbers with commas between them, got {text!r}") from None
