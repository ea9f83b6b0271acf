"""The command ``ring-attn generate`` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..error_reporting import errors_in_one_line


def generate(
    weights: Annotated[Path, typer.Option(help="A folder of save_weights, ring-attn train or a Llama of Hugging Face.")],
    prompt: Annotated[str | None, typer.Option(help="What the new text begins with.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file that holds it, in UTF-8, in place of --prompt.", show_default=False)
    ] = None,
    framework: Annotated[str, typer.Option(help="jax or torch.")] = "torch",
    ranks: Annotated[int, typer.Option(help="Members of the ring: GPUs where there are enough, else on this CPU.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of the new text.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the most probable token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many of the most probable tokens.", show_default="all")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the fewest whose probabilities sum to it.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another one draws another text.")] = 0,
    stop: Annotated[
        list[int] | None, typer.Option(help="A token id that ends the text; may be repeated.", show_default="the config's")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Tokens of the prompt at a time: less memory, and the bar moves.", show_default="all")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json.", show_default="the one beside the weights, else bytes")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="In which to keep the weights.", show_default="the config's")] = None,
) -> None:
    """Continue a prompt with a language model: write the new text to stdout and the progress to stderr."""
    with errors_in_one_line():
        from .run import run
        from .settings import GenerateSettings

        settings = GenerateSettings(
            weights=weights,
            prompt=prompt_file,
            text=prompt,
            framework=framework,
            ranks=ranks,
            new=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop) if stop else None,
            chunk=chunk,
            tokenizer=tokenizer,
            dtype=dtype,
        )
        run(settings)
