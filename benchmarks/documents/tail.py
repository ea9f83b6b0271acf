"""How much faster are planned global batches of short and long documents than a static ring, without communication?

    python -m benchmarks.documents.tail [--cpu] [--ranks 8] [--tokens 16384] [--documents 150]

One GPU, bfloat16, attention of Llama-3-8B: 32 query heads and 8 key heads of 128. ``plan_batches`` divides a global batch of
documents, 98 % log-normal (median 1,340 tokens, sigma 1.3) and 2 % even up to 131,072 tokens, into rows of ranks x tokens. Both
candidates compute the same rows: "planned" as balanced layouts by the strategy "direct", "static" as a zigzag ring that omits the
steps in which a rank sees no key. The launches of each rank run one after the other, and the slowest rank gives the time of a
row. So ranks of the ring need not wait for each other at each step, and no transfer costs time: both flatter the static ring.

Prediction: in a zigzag ring the slowest rank has about twice the mean pairs of rows of short documents, and nearly the mean in
rows that one long document fills. Steps of a ring cost float32 state and tails of waves: 1.5 x and more over the batch.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from parity_tests.support.document_lengths import long_tail
from ring_attn_core import plan_batches

from ..support import harness
from ..support.turns import take_turns
from .launches import Sizes, ranks_of

CANDIDATES = {"planned": "direct", "static": "zigzag"}
PASSES = "forward", "backward"
TOKEN_COST = 30_000.0
"""The compute of a token besides attention, in pairs: about that of Llama-3-8B."""


def padded(documents: list[int], length: int) -> list[int]:
    """Fill a row with documents of 64 tokens of padding, whose pairs weigh next to nothing."""
    short, rest = divmod(length - sum(documents), 64)
    return [*documents, *[64] * short, *[rest] * bool(rest)]


def rows(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each microbatch and candidate, and at the end the tokens/s of both over the whole batch."""
    sizes = Sizes(options.tokens, options.heads, options.kv_heads, options.dim, "cpu" if options.cpu else "cuda")
    lengths = long_tail(options.documents)
    plan = plan_batches(lengths, options.ranks, options.tokens, cost=TOKEN_COST)
    total = dict.fromkeys(CANDIDATES, 0.0)
    for number, batch in enumerate(plan):
        documents = [lengths[i] for i in batch.documents]
        row = padded(documents, options.ranks * options.tokens)
        found = {name: ranks_of(sizes, layout, row, options.ranks, True) for name, layout in CANDIDATES.items()}
        works = {(name, i, p): rank.works[p] for name, of in found.items() for i, rank in enumerate(of) for p in PASSES}
        seconds = take_turns({str(key): work for key, work in works.items()}, options.rounds)
        for name, of in found.items():
            times = [sum(seconds[str((name, i, p))] for p in PASSES) for i in range(len(of))]
            total[name] += max(times)
            facts = {"microbatch": number, "documents": len(documents), "longest": max(documents), "candidate": name}
            even = round(max(times) / statistics.mean(times), 3)
            yield facts | {"ms of the slowest rank": round(1e3 * max(times), 2), "max/mean time": even}
        del found, works  # and their memory
    for name, seconds_of in total.items():
        rate = round(sum(lengths) / options.ranks / seconds_of)
        yield {"microbatch": "all", "documents": len(lengths), "candidate": name, "tokens/s a GPU": rate} | {
            "of static": round(total["static"] / seconds_of, 3)
        }


if __name__ == "__main__":
    sizes = {"ranks": 8, "tokens": 16384, "documents": 150, "heads": 32, "kv_heads": 8, "dim": 128, "rounds": 3}
    options = harness.options(__doc__, **sizes, cpu=False, out="batches-ring-h200")
    harness.record(__doc__, options.out, "rows", rows(options), options=vars(options))
