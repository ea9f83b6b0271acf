"""How fast does a model of transformers train over a ring, at the shapes that people have?

    python -m benchmarks.hugging_face [--rows qwen3-8b:ring:12:131072:offload gpt-oss-20b:ring:4:65536 ...]

A row is model:attention:layers:tokens per GPU, with ``:offload`` if the kept activations are offloaded to host memory. One
sequence over all GPUs of this host, zigzag; weights, gradients and AdamW's moments in float32, sharded over the same GPUs
(FSDP2); layers computed in bfloat16 and recomputed in the backward; gradients clipped by their global norm. "ring" enters
``sequence_parallel`` with loss_chunk=4096. Any other attention is transformers' own, with a loss that holds all logits, and runs
on one GPU. Random weights and ids; the median of several steps after a warm-up step. Model TFLOP/s count a token's operations in
products and in visible pairs (problem.py), and nothing for recomputation.

Prediction (one H200, 131,072 tokens, one layer of Qwen3-8B): attention takes 1.4e14 operations forward at 640 TFLOP/s and 3.5e14
backward at 530, 0.88 s; products 2.0e14, with the forward twice, at 650, 0.31 s; transformers' norms in float32, rotary, SwiGLU
and their gradients, about 120 passes over 1.07 GB at 4 TB/s, 0.05 s. 6.4e14 operations count: 510 TFLOP/s.

Measured (results/hugging-face-h200.json; one H200, torch 2.11, transformers 5.23):
  Qwen3-8B, 12 layers, 131,072 tokens, offload: 16.4 s, 501 TFLOP/s, 93 GB. With a sequence over more GPUs, attention is a larger
  part and its rate higher; 4 GPUs, with 524,288 tokens and all 36 layers, were not available.
  4 layers, 32,768 tokens: 432 TFLOP/s, 50 GB; transformers' sdpa 398 and 89 GB, with all logits. The losses of three steps agree
  to 9e-5 of 12.7, the rounding of bfloat16.
  gpt-oss-20b, 4 layers, 65,536 tokens: 318 TFLOP/s, 95 GB; 37 % of the operations are in attention, 34 in the head and 23 in the
  experts, in grouped products. Neither sdpa nor accelerate's context parallelism supports sinks.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..support import report
from ..support.process import run_fresh
from .problem import Problem

ROWS = [
    "qwen3-8b:ring:12:131072:offload",
    "qwen3-8b:ring:4:32768",
    "qwen3-8b:sdpa:4:32768",
    "gpt-oss-20b:ring:4:65536",
]


def measure(problem: Problem, gpus: int) -> dict[str, Any]:
    """Return the seconds of the median step, its rates, and the largest peak of a GPU in GB."""
    found = run_fresh("benchmarks.hugging_face.rank", {**problem._asdict(), "gpus": gpus}, gpus)
    seconds = statistics.median(max(ranks) for ranks in zip(*(rank["seconds"] for rank in found), strict=True))
    return {
        "model": problem.model,
        "attention": problem.attention,
        "layers": problem.layers,
        "tokens a GPU": problem.tokens,
        "gpus": gpus,
        "seconds": round(seconds, 3),
        "all seconds": [[round(x, 3) for x in rank["seconds"]] for rank in found],
        "warm-up s": round(max(rank["first"] for rank in found), 1),
        "TFLOP/s a GPU": round(found[0]["flops"] / seconds / 1e12, 1),
        "tokens/s a GPU": round(problem.tokens / seconds),
        "peak GB": round(max(rank["peak"] for rank in found) / 1e9, 2),
        "losses": found[0]["losses"],
    }


def show(cells: list[dict[str, Any]]) -> Table:
    columns = [name for name in cells[0] if name not in ("all seconds", "losses")]
    table = Table(title="a step", title_justify="left")
    for column in columns:
        table.add_column(column)
    for cell in cells:
        table.add_row(*(str(cell[name]) for name in columns))
    return table


def problem_of(row: str, steps: int, tiny: bool) -> Problem:
    model, attention, layers, tokens, *rest = row.split(":")
    return Problem(model, attention, int(layers), int(tokens), steps, rest == ["offload"], tiny)


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--rows", nargs="*", default=ROWS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="narrow, float32 and on CPUs: to see that it runs")
    parser.add_argument("--out", default="hugging-face-h200", help="name of the result file")
    given = parser.parse_args()
    gpus = 2 if given.tiny else torch.cuda.device_count()
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment()}
    if not given.tiny:
        result["hardware"] = {"gpu": torch.cuda.get_device_name(), "gpus": gpus, **result["hardware"]}
    result["steps"] = []
    for row in given.rows:
        problem = problem_of(row, given.steps, given.tiny)
        result["steps"].append(measure(problem, gpus if problem.attention == "ring" else 1))
        Console(width=140).print(show(result["steps"]))
        print(report.save(given.out, result))  # after each, so that a later failure loses nothing


if __name__ == "__main__":
    main()
