"""How evenly do the ranks of a ring compute packed documents in each layout, and how fast, without communication?

    python -m benchmarks.documents [--cpu] [--tokens 8192] [--ranks 4 8] [--steps all]

One GPU, bfloat16, 64 query heads and 8 key heads of 128. The launches of each rank run one after the other. Documents are
log-normal: median 1,340 tokens, sigma 1.3, clipped to 64 and a quarter of the sequence; five batches of fixed seeds. "One launch"
is the same sequence on one rank, its time divided by the ranks. ``--steps seen`` omits the steps in which a rank sees no key.

Prediction (8 ranks): the slowest rank takes at most 1.06 of the mean time in balanced, about twice in zigzag and contiguous. Each
step reads and writes the float32 state, 0.54 GB or 0.2 ms, beside some 0.2 ms of products: with all steps, balanced stays far
below 0.93 of one launch.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..support import harness
from ..support.turns import take_turns
from .launches import PASSES, Sizes, drawn, ranks_of

LAYOUTS = "balanced", "zigzag", "contiguous"


def rows(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each ring, layout and pass: the means over the batches, and all ranks' milliseconds."""
    sizes = Sizes(options.tokens, options.heads, options.kv_heads, options.dim, "cpu" if options.cpu else "cuda")
    for ranks in options.ranks:
        batches = []
        for batch in range(options.batches):
            documents = drawn(ranks * options.tokens, np.random.default_rng(batch))
            found = {name: ranks_of(sizes, name, documents, ranks, options.steps == "seen") for name in options.layout}
            found["one launch"] = ranks_of(sizes._replace(tokens=ranks * options.tokens), "contiguous", documents, 1)
            works = {(name, i, p): rank.works[p] for name, of in found.items() for i, rank in enumerate(of) for p in rank.works}
            seconds = take_turns({str(key): work for key, work in works.items()}, options.rounds)
            batches.append(({name: [(rank.pairs, len(rank.steps)) for rank in of] for name, of in found.items()}, seconds))
            del found, works  # and their memory
        for name in options.layout:
            for index, of_pass in enumerate(PASSES):
                yield {"ranks": ranks, "layout": name, "pass": of_pass} | _row(batches, name, of_pass, 4.0 + 6 * index, sizes)


def _row(batches: list[Any], name: str, of_pass: str, products: float, sizes: Sizes) -> dict[str, Any]:
    """Return the ratios and rates of a layout. ``products``: floating point operations of a visible pair for each column."""
    even, whole, rates, slowest, all_ms = [], [], [], [], []
    for found, seconds in batches:
        of = found[name]
        times = [seconds[str((name, rank, of_pass))] for rank in range(len(of))]
        flops = [products * sizes.heads * sizes.dim * pairs for pairs, _ in of]
        even.append(max(times) / statistics.mean(times))
        whole.append(seconds[str(("one launch", 0, of_pass))] / len(of) / max(times))
        rates.append(statistics.mean(flops) / max(times) / 1e12)
        slowest.append(flops[int(np.argmax(times))] / max(times) / 1e12)
        all_ms.append([round(1e3 * x, 3) for x in times])
    ratios = {"max/mean time": statistics.mean(even), "worst": max(even), "of one launch": statistics.mean(whole)}
    means = {"TFLOP/s a GPU": rates, "TFLOP/s of the slowest rank": slowest}
    steps = statistics.mean(count for found, _ in batches for _, count in found[name])
    return {
        "steps": round(steps, 2),
        **{key: round(x, 3) for key, x in ratios.items()},
        **{key: round(statistics.mean(x), 1) for key, x in means.items()},
        "ms of ranks": all_ms,
    }


if __name__ == "__main__":
    sizes = {"tokens": 8192, "heads": 64, "kv_heads": 8, "dim": 128, "batches": 5, "rounds": 5}
    choices: dict[str, Any] = {"ranks": (4, 8), "layout": [*LAYOUTS], "steps": "all", "cpu": False}
    options = harness.options(__doc__, **sizes, **choices, out="documents-ring-h100")
    harness.record(__doc__, options.out, "rows", rows(options), options=vars(options))
