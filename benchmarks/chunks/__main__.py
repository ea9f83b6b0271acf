"""What do the MLP and the loss cost in chunks of the sequence, in time and in memory, against all tokens at once?

    python -m benchmarks.chunks [--part mlp layer loss] [--tokens 32768]

One GPU, the shape of Llama 3 8B: dim 4096, 14336 features inside the MLP, a vocabulary of 128,256; activations in bfloat16,
weights in float32. Forward and backward of the MLP by itself, of a layer that keeps its activations or computes them again,
and of the loss of hidden states; whole and in chunks, in turns in one process. ``peak``: what a call takes besides what it is
given, from PyTorch's allocator and from XLA's plan. Chunks of the loss are measured alone at 131,072 tokens too, where whole
logits would take 67 GB.

Prediction (one H200, 32,768 tokens):
  Time. The MLP is 3 x 2 x 32768 x 4096 x 14336 = 1.15e13 operations forward, 3.5e13 with its backward, 53 ms at 650 TFLOP/s. A
  chunk is computed again once, a third of that: 71 ms where nothing else is computed again, and nothing more inside a layer that
  is. The loss, 3 x 2 x 32768 x 4096 x 128256 = 1.03e14, 160 ms, and whole logits are read and written some ten times in float32,
  17 GB each: 40 ms that chunks do not save but for what fits the cache.
  Memory. The MLP keeps four arrays of 14336 features, 3.8 GB, in chunks of 4,096 an eighth. Whole logits take 8.4 GB in bfloat16
  and twice that in float32; a chunk's 3.2, and the head's gradient in float32 2.1.

Measured (results/chunks-h200.json; torch 2.11, jax 0.11.2):
  MLP. Inside a layer that is computed again, chunks of 8,192 cost 2.7 % of the layer in both frameworks and chunks of 4,096 5 %:
  smaller products, and weights whose gradient is added up in float32 for every chunk. By itself in PyTorch 1.28 times the whole,
  as predicted, in JAX 1.05. A layer's peak falls from 8.5 to 4.9 GB.
  Loss. In chunks PyTorch takes 0.76 to 0.79 of the whole's time and 10.8 GB for 24.2, JAX 1.01 and 6.9 for 19.2: its whole loss
  fuses what eager PyTorch writes out. 131,072 tokens take 11.6 and 8.5 GB.
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
"""Tokens whose loss is measured in chunks alone."""


def measure(framework: str, part: str, tokens: int, chunks: tuple[int | None, ...], rounds: int) -> list[dict[str, Any]]:
    """A row for each size of the chunks: milliseconds, their ratio to the first's, and GB at the peak."""
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
