"""What do the MLP and the loss cost in chunks of the sequence, in time and in memory, against all tokens at once?

    python -m benchmarks.chunks [--part mlp layer loss] [--tokens 32768]

One GPU, the shape of Llama 3 8B: dim 4096, an MLP of 14336 features, a vocabulary of 128,256; activations in bfloat16, weights in
float32. Forward and backward of the MLP alone, of a layer that keeps or recomputes its activations, and of the loss from hidden
states; whole and in chunks, in turns in one process. ``peak``: the memory of a call beyond its inputs, from PyTorch's allocator
and from XLA's memory analysis. Only the chunked loss is also measured at 131,072 tokens: whole logits would take 67 GB there.

Prediction (one H200, 32,768 tokens):
  Time. The MLP takes 3 x 2 x 32768 x 4096 x 14336 = 1.15e13 operations forward and 3.5e13 with its backward, 53 ms at 650
  TFLOP/s. Each chunk is recomputed once, a third more: 71 ms if nothing else is recomputed, and nothing more inside a layer that
  is recomputed. The loss takes 3 x 2 x 32768 x 4096 x 128256 = 1.03e14 operations, 160 ms. Whole logits, 17 GB in float32, are
  read and written about ten times, 40 ms; of these, chunks save only what fits the cache.
  Memory. The MLP keeps four arrays of 14336 features, 3.8 GB; in chunks of 4,096 it keeps an eighth. Whole logits take 8.4 GB in
  bfloat16 and twice that in float32. The logits of a chunk take 3.2 GB, and the head's gradient in float32 2.1 GB.

Measured (results/chunks-h200.json; torch 2.11, jax 0.11.2):
  MLP. Inside a layer that is recomputed, chunks of 8,192 cost 2.7 % of the layer in both frameworks and chunks of 4,096 cost 5 %:
  products are smaller, and the gradients of the weights are accumulated in float32 for each chunk. The MLP alone takes 1.28 times
  the whole in PyTorch, as predicted, and 1.05 times in JAX. The peak of a layer falls from 8.5 to 4.9 GB.
  Loss. In chunks, PyTorch takes 0.76 to 0.79 of the time of the whole and 10.8 GB instead of 24.2; JAX takes 1.01 and 6.9 GB
  instead of 19.2, because its whole loss fuses what eager PyTorch writes out. 131,072 tokens take 11.6 and 8.5 GB.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..support import report
from ..support.turns import take_turns

FRAMEWORKS = {"torch": "benchmarks.chunks.torch_side", "jax": "benchmarks.chunks.jax_side"}
PARTS = "mlp", "layer, keep", "layer, recompute", "loss"
CHUNKS = None, 8192, 4096
LONG = 131072
"""Tokens of the loss that is measured in chunks only."""


def measure(framework: str, part: str, tokens: int, chunks: tuple[int | None, ...], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each chunk size: milliseconds, their ratio to those of the first size, and the peak in GB."""
    side = import_module(FRAMEWORKS[framework])
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


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="forward and backward", title_justify="left")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--framework", nargs="*", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default="chunks-h200", help="name of the result file")
    options = parser.parse_args()
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment()}
    result["hardware"] = {"gpu": torch.cuda.get_device_name(), **result["hardware"]}
    rows: list[dict[str, Any]] = []
    for framework in options.framework:
        for part in options.part:
            rows += measure(framework, part, options.tokens, CHUNKS, options.rounds)
            if part == "loss":
                rows += measure(framework, part, LONG, CHUNKS[-1:], options.rounds)
            report.save(options.out, result | {"rows": rows})
    Console(width=110).print(show(rows))


if __name__ == "__main__":
    main()
