"""How evenly do the ranks of a ring compute packed documents in each layout, and how fast, without communication?

    python -m benchmarks.documents [--cpu] [--tokens 8192] [--ranks 4 8] [--steps all]

One GPU, bfloat16, 64 query heads and 8 key heads of 128. The launches of each rank run one after the other. Documents are
log-normal: median 1,340 tokens, sigma 1.3, clipped to 64 and a quarter of the sequence; five batches of fixed seeds. "One launch"
is the same sequence on one rank, its time divided by the ranks. "direct" is the balanced layout with the strategy "direct": one
step on a rank's own and received keys. The others are the steps of the strategy "ring"; ``--steps seen`` omits those in which a
rank sees no key.

Prediction (8 ranks): the slowest rank takes at most 1.06 of the mean time in balanced, about twice in zigzag and contiguous. Each
step reads and writes the float32 state, 0.54 GB or 0.2 ms, beside some 0.2 ms of products: with all steps, balanced stays far
below 0.93 of one launch. "direct" carries no state: at least 0.93 of one launch. Two steps, with the received keys in the second,
took 1.25 of the time of one launch (H100). "layout ms" is the host's time to deal the documents to the ranks: at most 1 ms at 8
ranks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np

from ring_attn_core.plan.balanced import balanced_layout

from ..support import harness
from ..support.turns import take_turns
from .launches import Sizes, drawn, ranks_of

LAYOUTS = "direct", "balanced", "zigzag", "contiguous"
WHOLE = "one launch"
PRODUCTS = {"forward": 4.0, "backward": 10.0}
"""Floating point operations of a visible pair for each column of a head, by pass."""


def layout_ms(documents: list[int], ranks: int) -> float:
    """Return the milliseconds of one core that ``balanced_layout`` takes, the best of 20."""

    def seconds() -> float:
        began = time.process_time()
        balanced_layout(documents, ranks)
        return time.process_time() - began

    return round(1e3 * min(seconds() for _ in range(20)), 3)


def rows(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each ring, batch, layout and pass."""
    sizes = Sizes(options.tokens, options.heads, options.kv_heads, options.dim, "cpu" if options.cpu else "cuda")
    for ranks, batch in itertools.product(options.ranks, range(options.batches)):
        documents = drawn(ranks * options.tokens, np.random.default_rng(batch))
        found = {name: ranks_of(sizes, name, documents, ranks, options.steps == "seen") for name in options.layout}
        found[WHOLE] = ranks_of(sizes._replace(tokens=ranks * options.tokens), "contiguous", documents, 1)
        works = {(name, i, p): rank.works[p] for name, of in found.items() for i, rank in enumerate(of) for p in rank.works}
        seconds = take_turns({str(key): work for key, work in works.items()}, options.rounds)
        for name, (of_pass, products) in itertools.product(options.layout, PRODUCTS.items()):
            times = [seconds[str((name, rank, of_pass))] for rank in range(ranks)]
            flops = [products * sizes.heads * sizes.dim * rank.pairs for rank in found[name]]
            yield {
                "ranks": ranks,
                "batch": batch,
                "layout": name,
                "pass": of_pass,
                "steps": statistics.mean(len(rank.steps) for rank in found[name]),
                "layout ms": layout_ms(documents, ranks) if name in ("direct", "balanced") else None,
                "max/mean time": round(max(times) / statistics.mean(times), 3),
                "of one launch": round(seconds[str((WHOLE, 0, of_pass))] / ranks / max(times), 3),
                "TFLOP/s a GPU": round(statistics.mean(flops) / max(times) / 1e12, 1),
                "TFLOP/s of the slowest rank": round(flops[int(np.argmax(times))] / max(times) / 1e12, 1),
                "ms of ranks": [round(1e3 * x, 3) for x in times],
            }
        del found, works  # and their memory


if __name__ == "__main__":
    sizes = {"tokens": 8192, "heads": 64, "kv_heads": 8, "dim": 128, "batches": 5, "rounds": 5}
    choices: dict[str, Any] = {"ranks": (4, 8), "layout": [*LAYOUTS], "steps": "all", "cpu": False}
    options = harness.options(__doc__, **sizes, **choices, out="documents-ring-h100")
    harness.record(__doc__, options.out, "rows", rows(options), options=vars(options))
