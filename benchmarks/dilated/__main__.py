"""How much faster than exact attention is dilated attention of a million tokens?

    python -m benchmarks.dilated [--framework torch jax] [--tokens 1048576] [--ranks 1] [--steps 100]

Forward and backward of one layer's attention, causal, bfloat16, 8 heads of 128, over ``ranks`` GPUs. Segments are 2,048 tokens,
4,096 and so on up to the whole sequence, dilations 1, 2 and so on in proportion; each head uses all of them (LongNet's mixing).
Exact ring attention (zigzag) runs on the same tokens in the same run. Medians over the steps after the first.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from typing import Any

from ..support import harness
from ..support.harness import median_of_slowest
from .problem import Problem


def measure(framework: str, problem: Problem, ranks: int, cpu: bool) -> list[dict[str, Any]]:
    """Return a row for dilated and a row for exact attention."""
    found, rows = harness.run_ranks(f"benchmarks.dilated.in_{framework}", problem, ranks, cpu), []
    for name, pairs in (("dilated", problem.pairs), ("exact", problem.exact_pairs)):
        if of_ranks := [rank[name] for rank in found if name in rank]:
            both = median_of_slowest(of_ranks, "both")
            rows.append(
                {
                    "framework": framework,
                    "attention": name,
                    "ranks": ranks,
                    "tokens": problem.tokens,
                    "steps": len(of_ranks[0]["both"]),
                    "forward ms": round(1e3 * median_of_slowest(of_ranks, "forward"), 2),
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


def rows(options: Namespace, problem: Problem) -> Iterator[dict[str, Any]]:
    for framework, ranks in product(options.framework, options.ranks):
        yield from measure(framework, problem, ranks, options.cpu)


if __name__ == "__main__":  # exact_steps 0 leaves exact attention out; cpu: on CPU devices and gloo, to see that it runs
    sizes = {"tokens": 2**20, "heads": 8, "head_dim": 128, "dtype": "bfloat16", "steps": 100, "exact_steps": 2}
    options = harness.options(__doc__, framework=[*harness.FRAMEWORKS], **sizes, ranks=(1,), cpu=False, out="dilated-h200")
    problem = harness.taken(options, Problem)
    patterns = {"segments": problem.segments, "dilations": problem.dilations}
    predicted = {"share of the pairs": problem.pairs / problem.exact_pairs, "GB moved": round(problem.moved / 1e9, 1)}
    facts = {"problem": problem._asdict(), "patterns": patterns, "predicted": predicted}
    harness.record(__doc__, options.out, "rows", rows(options, problem), **facts)
