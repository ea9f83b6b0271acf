"""The command ``ring-attn generate`` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..error_reporting import errors_in_one_line


def generate(
    weights: Annotated[
        Path, typer.Option(help="A folder written by save_weights or ring-attn train, or a Llama of Hugging Face.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to continue.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A UTF-8 file with the text to continue, in place of --prompt.", show_default=False)
    ] = None,
    framework: Annotated[str, typer.Option(help="jax or torch.")] = "torch",
    ranks: Annotated[int, typer.Option(help="Number of ranks: on GPUs if this machine has as many, else on its CPU.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of new tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="Divisor of the logits before a token is drawn. 0 takes the most probable token.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from this number of most probable tokens.", show_default="all")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the smallest set of most probable tokens whose probabilities sum to this.", show_default="all"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws. The same seed draws the same text.")] = 0,
    stop: Annotated[
        list[int] | None, typer.Option(help="Id of a token that ends the text; may be repeated.", show_default="the config's")
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(help="Prompt tokens to prefill at a time. Chunks need less memory and show progress.", show_default="all"),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Path of a tokenizer.json.", show_default="the one beside the weights, else bytes")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the weights in memory.", show_default="the config's")] = None,
    shard_weights: Annotated[
        bool, typer.Option("--shard-weights", help="In JAX: share the weights among the ranks, for a model larger than a GPU.")
    ] = False,
) -> None:
    """Continue a prompt with a language model. Write the new text to stdout and the progress to stderr."""
    options = locals()
    with errors_in_one_line():
        from .run import run
        from .settings import GenerateSettings

        run(GenerateSettings(**options))
