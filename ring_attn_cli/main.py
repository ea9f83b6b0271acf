"""The command ``ring-attn``, which needs the extra ``demo``. Slow imports are made inside the commands that need them."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from ring_attn_core import __version__, layouts, masks
from ring_attn_core.plan.ring import RingPlan

from .error_reporting import errors_in_one_line, missing_in_words
from .plan.options import check_drawable, check_used
from .plan.options import tokens as read_tokens

for package in ("typer", "rich"):
    if find_spec(package) is None:
        raise SystemExit(missing_in_words(package))

import typer  # noqa: E402
from rich.console import Console  # noqa: E402

from .compare.command import compare  # noqa: E402
from .compile.command import compile_kernels  # noqa: E402
from .doctor.command import doctor  # noqa: E402
from .generate.command import generate  # noqa: E402

app = typer.Typer(
    help="Exact ring attention: run the demo, train, generate, draw a plan, compare, compile, check this machine.",
    no_args_is_help=True,
    add_completion=False,
)


def _tokens(text: str) -> int:
    try:
        return read_tokens(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _print_version(requested: bool) -> None:
    """If ``requested``, print the version and exit, before typer reports a missing command."""
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Exact attention over sequences that no single device can hold."""


@app.command()
def plan(
    context: typer.Context,
    layout: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(layouts.LAYOUTS)}; or balanced, with --documents or --tree.",
            show_default="zigzag, with --documents or --tree balanced",
        ),
    ] = None,
    mask: Annotated[
        str, typer.Option(help="full, causal[:offset] or sliding_window:before[:after[:offset]], in tokens.")
    ] = "causal",
    ranks: Annotated[int | None, typer.Option(help="Number of ranks.", show_default="8")] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the whole sequence, such as 8192 or 10M; shards are padded to equal lengths.",
            show_default="8192",
            parser=_tokens,
            metavar="TOKENS",
        ),
    ] = None,
    kv_length: Annotated[int | None, typer.Option(hidden=True)] = None,
    save: Annotated[Path | None, typer.Option(help="Also write the drawing to this file, a .svg.")] = None,
    documents: Annotated[
        str | None,
        typer.Option(
            help="Draw packed documents of these lengths in tokens: 4096,512,1024, or a file of lengths.", show_default="none"
        ),
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(help="Draw a prefix tree: 4096,512x8 (a prompt and 8 completions), or a file.", show_default="none"),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(help="Plan the microbatches of documents of these lengths: a JSON list, or a file.", show_default="none"),
    ] = None,
    all_layouts: Annotated[bool, typer.Option("--all-layouts", hidden=True)] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Compute how many tokens fit into memory with this model: a config.json, or a name such as llama-8b."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="With --model: number of GPUs that share sequence and weights. Alone: predict each strategy's time on them.",
            show_default="8",
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Predict the time of each strategy on these GPUs: H200 or H100.",
            show_default="H200",
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(help="For a prediction: numbers of query heads and key heads.", show_default="32/8, or the --model's"),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="For a prediction: size of a head.", show_default="128, or the --model's")
    ] = None,
    host_gpus: Annotated[int, typer.Option(help="For a prediction: number of GPUs in a host.")] = 8,
    memory: Annotated[float, typer.Option(help="With --model: memory of a GPU, in GiB.")] = 80,
    host_memory: Annotated[
        float | None, typer.Option(help="With --model: host memory for each GPU, in GiB.", show_default="any")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="With --model: tokens on each GPU. With --batches: tokens of a microbatch on each rank.",
            show_default="as many as fit, with --batches 8192",
        ),
    ] = None,
    activations: Annotated[
        str, typer.Option(help="With --model: what happens to activations: keep, recompute or offload.")
    ] = "offload",
) -> None:
    """Draw a plan: the tokens of each rank, the query-key pairs computed at each step, and the work of each rank.

    With --documents, draw packed documents: the work of each rank, and the keys it needs from other ranks. With --tree, draw a
    prefix tree. With --batches, plan microbatches. With --model, print what fits into memory. With --machine, or --gpus alone,
    predict the time of each strategy.
    """
    with errors_in_one_line():
        if kv_length is not None:
            raise ValueError("--kv-length is gone: RingPlan(kv_length=...) plans cross-attention in Python")
        if all_layouts:
            raise ValueError("--all-layouts is gone: pass --documents with the length, which compares all layouts")
        view = Console(width=shutil.get_terminal_size().columns)  # $COLUMNS, else the terminal's width, else 80
        if machine is not None or (gpus is not None and model is None):
            from .plan import predict

            check_used(context, "prediction")
            where = layout or "zigzag", mask, 8 if gpus is None else gpus, 8192 if length is None else length, machine or "H200"
            sizes = *predict.heads_of(model, heads, head_dim), host_gpus
            view.print(predict.answer(predict.PredictOptions(*where, *sizes)))
            return
        if model is not None:
            from .plan import memory as fitting

            check_used(context, "memory")
            options = fitting.MemoryOptions(model, 8 if gpus is None else gpus, memory, host_memory, tokens, activations)
            view.print(fitting.answer(options))
            return
        ranks = 8 if ranks is None else ranks
        packing = {"batches": batches, "documents": documents, "tree": tree}
        if kind := next((name for name, text in packing.items() if text is not None), None):
            from .plan import packed

            check_used(context, kind)
            check_drawable(ranks)
            where = layout or packed.BALANCED
            if batches is not None:
                view.print(packed.answer_batches(packed.read_batches(batches), ranks, 8192 if tokens is None else tokens))
            elif documents is not None:
                lengths = packed.read_documents(documents)
                view.print(packed.answer_documents(where, lengths, masks.parse(mask), ranks, view.width))
            elif tree is not None:
                view.print(packed.answer_tree(where, packed.read_tree(tree), ranks, view.width))
            return
        if layout == "balanced":
            raise ValueError(
                "the layout balanced follows from documents or a tree: pass --documents or --tree with their lengths"
            )
        check_used(context, "drawing")
        from .plan import terminal

        if save is not None:
            terminal.check_picture(save)
        drawing = terminal.draw(make_plan(layout or "zigzag", mask, ranks, 8192 if length is None else length), view.width)
        view.print(drawing)
        if save is not None:
            terminal.save(drawing, save, view.width)
            typer.echo(f"wrote {save}")


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Number of ranks: processes in PyTorch, devices in JAX.")] = 4,
    tokens: Annotated[int | None, typer.Option(help="Tokens in a sequence.", show_default="4096, quick 2048, full 16384")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of training steps.", show_default="6, quick 3, full 12")] = None,
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(layouts.LAYOUTS)}.")] = "zigzag",
    framework: Annotated[str, typer.Option(help="both, jax or torch.")] = "both",
    out: Annotated[Path, typer.Option(help="Folder for losses.png, plan.svg and demo.json.")] = Path("demo-output"),
    quick: Annotated[bool, typer.Option("--quick", help="Use a short sequence and a few steps.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Use a long sequence and more steps; takes minutes.")] = False,
) -> None:
    """Check on this CPU that the ring is exact and that PyTorch and JAX train alike. Exit with status 1 if a check fails."""
    with errors_in_one_line():
        from .demo.run import DemoSettings, run

        settings = DemoSettings.make(quick, full, ranks=ranks, tokens=tokens, steps=steps, layout=layout)
        status = run(settings, framework, out)
    raise typer.Exit(status)


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file. Without it, every key has its default.", show_default=False)
    ] = None,
    framework: Annotated[str, typer.Option(help="jax or torch.")] = "torch",
    out: Annotated[str | None, typer.Option(help="Folder of the run; overrides the config.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the whole run; overrides the config.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks in a ring; overrides the config.")] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            help="For JAX in several processes: HOST:PORT of the first process, or auto under Slurm, Open MPI and Kubernetes."
        ),
    ] = None,
    process: Annotated[
        str | None,
        typer.Option(help="With --coordinator HOST:PORT: index of this process and number of processes, from 0/4 to 3/4."),
    ] = None,
) -> None:
    """Train a language model, or resume the run in the output folder. Under torchrun, use the processes that torchrun started."""
    with errors_in_one_line():
        from .train.config import read
        from .train.run import Program, run

        program = None if coordinator is None and process is None else Program.of(coordinator, process)
        run(read(config, out=out, steps=steps, ranks=ranks), framework, program)


for name, command in (("doctor", doctor), ("compare", compare), ("compile", compile_kernels), ("generate", generate)):
    app.command(name)(command)


def make_plan(layout: str, mask: str, ranks: int, length: int) -> RingPlan:
    check_drawable(ranks)
    seq_local = layouts.padded_local(layout, max(ranks, 1), length)  # RingPlan rejects ranks below 1
    return RingPlan(layout, masks.parse(mask), ranks, seq_local, length=length)


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr, so that no pipe to a rank gets file descriptor 0, 1 or 2."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def main() -> None:
    open_closed_streams()
    app(prog_name="ring-attn")


if __name__ == "__main__":
    main()
