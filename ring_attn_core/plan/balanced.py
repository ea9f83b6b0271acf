"""The balanced layout: it assigns packed documents to ranks so that ranks compute nearly equally much and few keys travel.

Documents of 4, 12, 3, 8 and 5 tokens over 4 ranks of 8 tokens, under a causal mask:

    document   A A A A B B B B B B B B B B B B C C C D D D D D D D D E E E E E
    rank       0 0 0 1 2 2 2 2 2 2 2 2 1 1 0 0 0 0 0 3 3 3 3 3 3 3 3 1 1 1 1 1

                 visible pairs of a rank's queries     keys that a rank receives from other ranks
                     rank 0   1   2   3                    rank 0   1   2   3
    balanced             35  38  36  36                        10  11   0   0
    zigzag               24  32  40  49                         1   5   5   8
    contiguous           20  68  21  36                         0   4   0   5

A causal query costs one pair for each token of its document up to and including the query. The documents, sorted by the mean
cost of their queries, form one sequence of tokens. The ranks take their tokens one after another. Each rank takes some from the
cheap end of the sequence and the rest from the costly end, so that it gets an equal share of the remaining cost. This follows
the alias method for sampling a distribution (Walker 1974). Most short documents stay whole. A document on one rank, such as D,
causes no traffic. Under a causal mask a long document, such as B, is cut into parts for several ranks, from its end to its
beginning: the lowest of these ranks holds the last queries, which see the most keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..layouts import check_ranks
from ..runs import Band, Run
from ..validation import in_words, is_integer
from .balanced_layout import BalancedLayout
from .dealing import AS_QUERIES, deal, join_items
from .documents import PackedDocuments, PairCost, count_inside


def balanced_layout(
    documents: object,
    ranks: int,
    *,
    seq_local: int | None = None,
    mask: Band | Mapping[Band, float] | None = None,
    pair_cost: PairCost | None = None,
) -> BalancedLayout:
    """Assign packed documents to ``ranks`` ranks: equal tokens, nearly equal cost, and few keys that travel.

    ``documents``: the lengths of the documents in tokens, in order, or one such sequence for each batch row; a single document is
    an unpacked sequence. ``seq_local``: tokens per rank, by default the smallest number with which all ranks together hold the
    longest row; positions after a row's tokens are padding. ``mask``: the mask inside a document, by default ``causal()``. A
    model with several kinds of layers passes a mapping of masks to their costs: ``{causal(): 8, sliding_window(4095): 24}`` for 8
    and 24 layers. ``pair_cost``: a function from a document's length in tokens to the cost of one visible (query, key) pair in
    it, by default 1. It may return more for short documents, because they fill the tiles of a kernel only in part.

    Neighbouring short documents are assigned as one if together they have at most as many tokens as a chunk. A chunk is an eighth
    of a shard, but at least 512 tokens (or a whole shard, if that is shorter) and at most 2,048. With about 2,000 tokens per rank
    or more, the costs of the ranks are equal within 1 % if ``pair_cost`` is given. Without ``pair_cost`` they are equal only
    within 3 %, on purpose: a part of a document takes time beyond its pairs, because the tiles at its ends are partly masked, so
    a rank with more parts, or later parts, gets fewer pairs. With fewer tokens per rank the costs may differ by more than 10 %.

    The result depends on the arguments alone, so each rank can compute it. On a CPU it takes milliseconds for dozens of
    documents, and longer for thousands. Raise ValueError if ``ranks``, ``seq_local``, a length, a mask or a cost is invalid, or
    if the documents do not fit into ``ranks * seq_local`` tokens.
    """
    check_ranks(ranks)
    packed = PackedDocuments.of(documents, mask, pair_cost)
    local = -(-packed.length // ranks) if seq_local is None else seq_local
    if not is_integer(local) or local * ranks < packed.length:
        raise ValueError(
            f"seq_local is the number of tokens of a rank, an int, got {in_words(seq_local)}: {ranks} ranks need "
            f"{-(-packed.length // ranks)} for documents of {packed.length} tokens"
        )
    tokens = local * ranks
    edges, cost = sorted({*packed.boundaries, tokens}), AS_QUERIES if pair_cost is None else 0  # cost of a run, as queries
    if _later_cost_more(packed.masks):
        return BalancedLayout(deal(join_items(edges, local), edges, ranks, packed.cost_before, cost), packed.length, packed.rows)
    edges, mirrored = [tokens - edge for edge in reversed(edges)], lambda position: -packed.cost_before(tokens - position)
    dealt = deal(join_items(edges, local), edges, ranks, mirrored, cost)
    back = tuple(tuple((tokens - start - length, length) for start, length in reversed(rank)) for rank in dealt)
    return BalancedLayout(back, packed.length, packed.rows)


def layout_of_ids(ids: Any, ranks: int) -> BalancedLayout:
    """Assign the documents of batch rows to ranks, under a causal mask. ``ids``: int [batch, tokens] on the host; negative ids
    are padding, which costs nothing at a row's end, and elsewhere as much as a document of one token."""
    import numpy as np

    rows, ids = [], np.maximum(np.asarray(ids).astype(np.int64), -1)
    for row in ids:
        firsts = np.flatnonzero(np.diff(row, prepend=row[:1] - 1))
        rows.append(list(zip(row[firsts].tolist(), np.diff(firsts, append=len(row)).tolist(), strict=True)))
    return layout_of_stretches(rows, ids.shape[1], ranks)


def layout_of_stretches(
    rows: Sequence[Sequence[tuple[int, int]]], length: int, ranks: int, mask: Band | Mapping[Band, float] | None = None
) -> BalancedLayout:
    """Assign the documents of batch rows of ``length`` tokens to ranks. ``rows``: each row's stretches (document id, tokens) in
    order; negative ids are padding, as in ``layout_of_ids``."""
    documents = []
    for row in rows:
        held = row[:-1] if row and row[-1][0] < 0 else row
        lengths = [count for document, tokens in held for count in ([1] * tokens if document < 0 else [tokens])]
        if lengths:
            documents.append(lengths)
    return replace(balanced_layout(documents, ranks, seq_local=-(-length // ranks), mask=mask), length=length)


class RankWork(NamedTuple):
    """The work of one rank on packed documents, in any layout."""

    pairs: float
    """Cost of the visible pairs of the rank's queries: their number, if each pair costs 1."""
    remote: int
    """Number of keys of other ranks that the rank's queries see; these keys travel to the rank."""


def work_of(packed: PackedDocuments, rank: tuple[Run, ...]) -> RankWork:
    """Return the cost of the visible pairs of a rank's queries, and the number of keys that they see on other ranks."""
    seen = packed.seen(rank)
    own = sum(count_inside(run, seen) for run in rank)
    return RankWork(sum(map(packed.cost, rank)), sum(end - first for first, end in seen) - own)


def _later_cost_more(masks: tuple[tuple[Band, float], ...]) -> bool:
    """Return whether a long document's last query costs at least as much as its first, as ``deal`` needs."""
    side = lambda lag: float(2**40) if lag is None else lag
    return sum(cost * (side(mask.hi) - side(None if mask.lo is None else -mask.lo)) for mask, cost in masks) >= 0
