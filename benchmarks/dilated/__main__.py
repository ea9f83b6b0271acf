"""How much faster than exact attention is dilated attention of a million tokens?

    python -m benchmarks.dilated [--framework torch jax] [--tokens 1048576] [--ranks 1] [--steps 100]

Forward and backward of one layer's attention, causal, bfloat16, 8 heads of 128, over ``ranks`` GPUs. Segments are 2,048 tokens,
4,096 and so on up to the whole sequence, dilations 1, 2 and so on in proportion; each head uses all of them (LongNet's mixing).
Exact ring attention (zigzag) runs on the same tokens in the same run. Medians over the steps after the first.

Prediction (1,048,576 tokens, one H200, forward and backward):
  Exact: 5.5e11 pairs per head, 7.9e15 operations, 14 s at 560 TFLOP/s.
  Dilated: segments of 2,048 tokens have 1,024 pairs per token, and each later pattern has half of the one before: 1/256 of the
  pairs, 3.1e13 operations, 62 ms at 500 TFLOP/s; tiles of 128 make a triangle of 2,048 tokens 6 % larger. In addition, the tokens
  that a pattern keeps are copied and accumulated (``Problem.moved``): 96 GB, 27 ms at 3.5 TB/s. In all 95 ms, 150 times faster.

Measured (results/dilated-h200.json, one H200; torch 2.11, jax 0.11.2, Triton 3.6):
  PyTorch takes 252 ms beside 13.5 s, 53 times faster; JAX 172 ms beside 13.3 s, 77 times. 100 steps, all finite, the slowest 2 %
  above the median. Exact attention reaches 585 and 591 TFLOP/s. The kernels take 105 ms: 20 forward, as predicted, and 85
  backward instead of 44, for reasons not measured (a segment of 2,048 tokens is 16 tiles of keys, and a pipeline fills and drains
  in each). The rest, 145 ms in PyTorch, is data movement: strided rows of 256 bytes, in more passes than the formula has.
  With sums in place (results/dilated-h100.json, one H100) it is 246 ms, 55 times; one kernel for all sums would be the next step.
  The peak is 28 GB, in JAX 22, beside 13 of exact attention: the float32 sums of out, dq, dk and dv take 4.3 GB each.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from ..support import report
from ..support.process import run_fresh
from .problem import Problem


def measure(framework: str, problem: Problem, ranks: int, gpu: bool) -> list[dict[str, Any]]:
    """Return a row for dilated and a row for exact attention."""
    given = {**problem._asdict(), "ranks": ranks, "gpu": gpu}
    if framework == "torch":
        found = run_fresh("benchmarks.dilated.torch_rank", given, ranks)
    else:
        found = run_fresh("benchmarks.dilated.jax_process", given)
    rows = []
    for name, pairs in (("dilated", problem.pairs), ("exact", problem.exact_pairs)):
        of_ranks = [rank[name] for rank in found if name in rank]
        if not of_ranks:
            continue
        median = lambda what, of_ranks=of_ranks: statistics.median(
            max(step) for step in zip(*(rank[what] for rank in of_ranks), strict=True)
        )
        both, forward = median("both"), median("forward")
        rows.append(
            {
                "framework": framework,
                "attention": name,
                "ranks": ranks,
                "tokens": problem.tokens,
                "steps": len(of_ranks[0]["both"]),
                "forward ms": round(1e3 * forward, 2),
                "both ms": round(1e3 * both, 2),
                "slowest ms": round(1e3 * max(max(rank["both"]) for rank in of_ranks), 2),
                "TFLOP/s a rank": round(problem.flops(pairs) / both / ranks / 1e12, 1),
                "peak GB": round(max(rank["peak"] for rank in of_ranks) / 1e9, 2),
                "finite": all(rank["finite"] for rank in of_ranks),
            }
        )
    if len(rows) == 2:
        rows[0]["times exact"] = round(rows[1]["both ms"] / rows[0]["both ms"], 1)
    return rows


def show(rows: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title="forward and backward", title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--framework", nargs="*", choices=("torch", "jax"), default=["torch", "jax"])
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--exact-steps", type=int, default=2, help="0 leaves exact attention out")
    parser.add_argument("--cpu", action="store_true", help="on CPU devices and gloo: to see that it runs")
    parser.add_argument("--out", default="dilated-h200", help="name of the result file")
    options = vars(parser.parse_args())
    frameworks, ranks, cpu, out = (options.pop(name) for name in ("framework", "ranks", "cpu", "out"))
    problem = Problem(**options)
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment(), "problem": problem._asdict()}
    if not cpu:
        import torch

        result["hardware"] = {"gpu": torch.cuda.get_device_name(), "gpus": max(ranks), **result["hardware"]}
    result["patterns"] = {"segments": problem.segments, "dilations": problem.dilations}
    result["predicted"] = {"share of the pairs": problem.pairs / problem.exact_pairs, "GB moved": round(problem.moved / 1e9, 1)}
    result["rows"] = []
    for framework in frameworks:
        for size in ranks:
            result["rows"] += measure(framework, problem, size, not cpu)
            Console(width=150).print(show(result["rows"]))
            print(report.save(out, result))  # after each, so that a later failure loses nothing


if __name__ == "__main__":
    main()
