"""What do the MLP and the loss cost in chunks of the sequence, in time and in memory, against all tokens at once?

    python -m benchmarks.chunks [--part mlp layer loss] [--tokens 32768]

One GPU, the shape of Llama 3 8B: dim 4096, an MLP of 14336 features, a vocabulary of 128,256; activations in bfloat16, weights in
float32. Forward and backward of the MLP alone, of a layer that keeps or recomputes its activations, and of the loss from hidden
states; whole and in chunks, in turns in one process. ``peak``: the memory of a call beyond its inputs, from PyTorch's allocator
and from XLA's memory analysis. Only the chunked loss is also measured at 131,072 tokens: whole logits would take 67 GB there.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any

from ..support import harness
from ..support.turns import take_turns

PARTS = "mlp", "layer, keep", "layer, recompute", "loss"
CHUNKS = None, 8192, 4096
LONG = 131072
"""Number of tokens at which only the chunked loss is measured."""


def measure(framework: str, part: str, tokens: int, chunks: tuple[int | None, ...], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each chunk size: milliseconds, their ratio to those of the first size, and the peak in GB."""
    side = import_module(f"benchmarks.chunks.{framework}_side")
    cells = {str(chunk or "whole"): side.cell(part, tokens, chunk) for chunk in chunks}
    seconds = take_turns({name: cell.work for name, cell in cells.items()}, rounds)
    first = seconds[next(iter(cells))]
    return [
        {
            "framework": framework,
            "part": part,
            "tokens": tokens,
            "chunk": name,
            "ms": round(1e3 * seconds[name], 2),
            "ratio": round(seconds[name] / first, 3),
            "peak GB": round(cell.peak() / 1e9, 2),
        }
        for name, cell in cells.items()
    ]


def rows(options: Namespace) -> Iterator[dict[str, Any]]:
    for framework, part in product(options.framework, options.part):
        yield from measure(framework, part, options.tokens, CHUNKS, options.rounds)
        if part == "loss":
            yield from measure(framework, part, LONG, CHUNKS[-1:], options.rounds)


if __name__ == "__main__":
    options = harness.options(__doc__, framework=[*harness.FRAMEWORKS], part=[*PARTS], tokens=32768, rounds=9, out="chunks-h200")
    harness.record(__doc__, options.out, "rows", rows(options))
