"""The balanced layout: it assigns packed documents to ranks so that ranks compute nearly equally much and few keys travel.

Documents of 4, 12, 3, 8 and 5 tokens over 4 ranks of 8 tokens, under a causal mask:

    document   A A A A B B B B B B B B B B B B C C C D D D D D D D D E E E E E
    rank       0 0 0 1 2 2 2 2 2 2 2 2 1 1 0 0 0 0 0 3 3 3 3 3 3 3 3 1 1 1 1 1

                             rank 0   1   2   3           rank 0   1   2   3
    balanced     pairs           35  38  36  36     keys of   10  11   0   0
    zigzag       of each         24  32  40  49     other      1   5   5   8
    contiguous   rank            20  68  21  36     ranks      0   4   0   5

A causal query costs one pair for each token of its document up to and including the query. The documents, sorted by the mean
cost of their queries, form one sequence of tokens. Each rank in turn takes its tokens from both ends of the sequence, in the
proportion that gives it an equal share of the remaining cost. This follows the alias method for sampling a distribution (Walker
1974). Most short documents stay whole, and a document on one rank costs no traffic (D). Under a causal mask a long document is
cut into parts for several ranks, from its end to its beginning: the first of these ranks holds the last queries, which see the
most keys.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..layouts import check_ranks
from ..runs import Band, Run
from ..validation import in_words, is_integer
from .balanced_layout import BalancedLayout
from .documents import PackedDocuments, PairCost, count_inside

LEAST_CHUNK, MOST_CHUNK = 512, 2048
"""Bounds, in tokens, of the largest chunk: neighbouring short documents that are assigned together, to give ranks fewer runs."""

SNAP = 64
"""Largest distance, in tokens, at which a document's edge counts as near a cut; the cut may then move to this edge."""

MOST_WHOLE = 4
"""Largest number of documents or groups, the costliest per query, that ``_Remaining.costly`` tries to give a rank uncut."""

SLACK = 0.004
"""Largest relative deviation of a rank's cost from an equal share that is accepted to move a cut."""

AS_QUERIES = 300
"""What a run costs beside its queries: as much as this number of further queries like its first.

Tiles at the ends of a run are visible in part only. Of 60 ranks on an H200 (documents-direct-h200.json) the time of the backward
fits 250 queries, that of the forward 470, and that of both 297.
"""

MOST_UNEQUAL = 0.025
"""Largest part of an equal share by which a rank's pairs may differ from it, to make up for the cost of its runs."""


def balanced_layout(
    documents: object,
    ranks: int,
    *,
    seq_local: int | None = None,
    mask: Band | Mapping[Band, float] | None = None,
    pair_cost: PairCost | None = None,
) -> BalancedLayout:
    """Assign packed documents to ``ranks`` ranks: equal tokens, nearly equal cost, and few keys that travel.

    ``documents``: the lengths of the documents in tokens, in order, or one such sequence for each batch row; one document alone
    is an unpacked sequence. ``seq_local``: tokens per rank, by default the fewest that hold the longest row; the rest is
    padding. ``mask``: the mask inside a document, by default ``causal()``. A model with several kinds of layers passes a mapping
    of masks to their costs, such as ``{causal(): 8, sliding_window(4095): 24}`` for 8 and 24 layers. ``pair_cost``: a function
    from a document's length in tokens to the cost of one of its pairs, by default 1. It may return more for short documents,
    because they fill the tiles of a kernel only in part.

    Neighbouring short documents are assigned as one if together they have at most as many tokens as a chunk. A chunk is an eighth
    of a shard, but at least 512 tokens (or a whole shard, if that is shorter) and at most 2,048. From some 2,000 tokens per
    rank on, the costs of the ranks are equal within 1 % if ``pair_cost`` is given. Else they are equal within 2.5 %: a rank with
    more or later parts of documents gets fewer pairs, because tiles at the ends of a part are visible in part only. With fewer
    tokens the costs may differ by more than 10 %.

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
    edges, of_run = sorted({*packed.boundaries, tokens}), AS_QUERIES if pair_cost is None else 0
    if _later_cost_more(packed.masks):
        return BalancedLayout(deal(joined(edges, local), edges, ranks, packed.cost_before, of_run), packed.length, packed.rows)
    edges, mirrored = [tokens - edge for edge in reversed(edges)], lambda position: -packed.cost_before(tokens - position)
    dealt = deal(joined(edges, local), edges, ranks, mirrored, of_run)
    back = tuple(tuple((tokens - start - length, length) for start, length in reversed(rank)) for rank in dealt)
    return BalancedLayout(back, packed.length, packed.rows)


def layout_of_ids(ids: Any, ranks: int) -> BalancedLayout:
    """Assign the documents of batch rows to ranks, under a causal mask, and return the layout.

    ``ids``: int [batch, tokens] on the host, the document id of each token. Negative ids are padding. Padding at the end of a row
    costs nothing; any other padding token costs as much as a document of one token.
    """
    import numpy as np

    rows, ids = [], np.maximum(np.asarray(ids).astype(np.int64), -1)
    for row in ids:
        firsts = np.flatnonzero(np.diff(row, prepend=row[:1] - 1))
        rows.append(list(zip(row[firsts].tolist(), np.diff(firsts, append=len(row)).tolist(), strict=True)))
    return layout_of_stretches(rows, ids.shape[1], ranks)


def layout_of_stretches(
    rows: Sequence[Sequence[tuple[int, int]]], length: int, ranks: int, mask: Band | Mapping[Band, float] | None = None
) -> BalancedLayout:
    """Assign the documents of batch rows of ``length`` tokens to ranks, and return the layout.

    ``rows``: for each row the (document id, number of tokens) of its stretches of equal ids, in order. Negative ids are padding,
    as in ``layout_of_ids``. ``mask``: the mask inside a document, or masks with costs, as in ``balanced_layout``.
    """
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
    """Return the cost of the visible pairs of a rank's queries, and the number of keys that the queries see on other ranks.

    ``rank``: the runs of the rank.
    """
    seen = packed.seen(rank)
    own = sum(count_inside(run, seen) for run in rank)
    return RankWork(sum(map(packed.cost, rank)), sum(end - first for first, end in seen) - own)


class _Item(NamedTuple):
    """Consecutive positions that are assigned to ranks: a document, several short documents, or the rest of a document."""

    density: float
    """Mean cost of a query; items are sorted by it."""
    start: int
    end: int
    before: float
    """Cost of all queries before ``start``."""
    cost: float
    """Cost of the queries of the item."""


@dataclass(frozen=True)
class _Remaining:
    """The items not yet assigned, sorted by mean cost of a query. Each rank takes tokens from the cheap and the costly end."""

    items: list[_Item]
    edges: list[int]
    """Positions at which a document begins or ends, in order."""
    cost_before: Callable[[int], float]

    @cached_property
    def tokens(self) -> list[int]:
        """Return the number of tokens of the ``items`` before each item, followed by the number of tokens of all."""
        return list(accumulate([item.end - item.start for item in self.items], initial=0))

    @cached_property
    def costs(self) -> list[float]:
        return list(accumulate([item.cost for item in self.items], initial=0))

    def at(self, token: int) -> tuple[int, int]:
        """Return (index of the item, offset in the item) of token number ``token``, counted from 0 over all items in order."""
        index = bisect_right(self.tokens, token) - 1
        return index, token - self.tokens[index]

    def cost_of_first(self, tokens: int) -> float:
        """Return the cost of the first ``tokens`` tokens of all items in order."""
        index, offset = self.at(tokens)
        if not offset:
            return self.costs[index]
        return self.costs[index] + self.cost_before(self.items[index].start + offset) - self.items[index].before

    def costly(self, local: int, share: float) -> int:
        """Return how many of a rank's ``local`` tokens come from the costly end; the rest come from the cheap end.

        Bisection finds the number that gives the rank the cost ``share``. A number that moves a cut to an edge is preferred if
        its cost deviates by at most ``SLACK``.
        """
        total = self.tokens[-1]
        excess = lambda x: self.cost_of_first(local - x) + self.costs[-1] - self.cost_of_first(total - x) - share
        low, high = 0, local
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if excess(middle) >= 0 else (middle + 1, high)
        x = min((low, max(low - 1, 0)), key=lambda x: abs(excess(x)))
        near = [x - shift for cut in (local - x, total - x) for shift in self._to_edge(cut) if abs(shift) <= SNAP]
        whole = [total - first for first in self.tokens[-1 - MOST_WHOLE : -1]]
        fit = [y for y in (*near, *whole) if 0 <= y <= local and abs(excess(y)) <= SLACK * share]
        cut = lambda y: (self.at(local - y)[1] > 0) + (self.at(total - y)[1] > 0)
        return min(fit, key=lambda y: (cut(y), abs(y - x)), default=x)

    def _to_edge(self, cut: int) -> tuple[int, ...]:
        """Return the distances, in tokens, from a cut before token ``cut`` back to the last edge (<= 0) and on to the next (> 0).

        An edge is a position at which a document or item begins or ends. Return (0,) if the cut is at the edge of an item.
        """
        index, offset = self.at(cut)
        if not offset:
            return (0,)
        item = self.items[index]
        position, after = item.start + offset, bisect_right(self.edges, item.start + offset)
        before = max(item.start, self.edges[after - 1])
        return before - position, min([item.end, *self.edges[after : after + 1]]) - position

    def take(self, cheap: int, costly: int) -> tuple[list[tuple[int, int]], list[_Item]]:
        """Return the spans (start, end) of the first ``cheap`` and the last ``costly`` tokens, and the items that remain."""
        (i, a), (j, b) = self.at(cheap), self.at(self.tokens[-1] - costly)
        whole = [(item.start, item.end) for item in (*self.items[:i], *self.items[j + 1 :])]
        if i == len(self.items):
            return whole, []
        first, last = self.items[i], self.items[j] if j < len(self.items) else None
        cut, left = [(first.start, first.start + a)], self.items[i + 1 : j]
        if last is None:
            rests = [(first.start + a, first.end)]
        else:
            cut.append((last.start + b, last.end))
            rests = [(first.start + a, first.end), (last.start, last.start + b)] if i < j else [(first.start + a, last.start + b)]
        for start, end in rests:
            if start < end:
                insort(left, _item(start, end, self.cost_before))
        return whole + [span for span in cut if span[0] < span[1]], left


def _item(start: int, end: int, cost_before: Callable[[int], float]) -> _Item:
    before = cost_before(start)
    cost = cost_before(end) - before
    return _Item(cost / (end - start), start, end, before, cost)


def deal(
    cuts: list[int], edges: list[int], ranks: int, cost_before: Callable[[int], float], as_queries: int = 0
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Assign the tokens of items to each rank in turn, and return each rank's runs (start, length).

    ``cuts``: the positions at which an item begins or ends, in order, from 0 to the number of tokens of all ranks. ``edges``: the
    positions at which a document or a segment of a tree begins or ends; a cut inside an item may move to a near edge.
    ``cost_before``: a function from a position to the cost of all queries before it. The ranks get nearly equal costs if later
    queries of an item cost at least as much as earlier queries.

    ``as_queries``: what a run costs beside its queries, see ``AS_QUERIES``. The runs of a first assignment decide the shares of a
    second one.
    """
    items, local = sorted(_item(start, end, cost_before) for start, end in pairwise(cuts)), cuts[-1] // ranks
    first = _dealt(items, edges, cost_before, local, [0.0] * ranks)
    of_runs = [as_queries * sum(cost_before(start + 1) - cost_before(start) for start, _ in runs) for runs in first]
    most = max(max(of_runs) * ranks - sum(of_runs), sum(of_runs) - min(of_runs) * ranks)
    if not most:
        return first
    part = min(1, MOST_UNEQUAL * sum(item.cost for item in items) / most)
    return _dealt(items, edges, cost_before, local, [cost * part for cost in of_runs])


def _dealt(
    items: list[_Item], edges: list[int], cost_before: Callable[[int], float], local: int, besides: list[float]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Assign ``local`` tokens to each rank; return each rank's runs. ``besides``: the cost of each rank beside its queries."""
    dealt = []
    for rank, own in enumerate(besides[:-1]):
        remaining, left = _Remaining(items, edges, cost_before), besides[rank:]
        costly = remaining.costly(local, (remaining.costs[-1] + sum(left)) / len(left) - own)
        spans, items = remaining.take(local - costly, costly)
        dealt.append(_runs(spans))
    return (*dealt, _runs([(item.start, item.end) for item in items]))


def joined(edges: list[int], local: int) -> list[int]:
    """Join neighbouring short items, and return the edges of the resulting items.

    ``edges``: the positions at which an item begins or ends, in order. Neighbours are joined if they have at most
    ``min(max(local // 8, LEAST_CHUNK), MOST_CHUNK, local)`` tokens together. ``local``: tokens per rank.
    """
    chunk = min(max(local // 8, LEAST_CHUNK), MOST_CHUNK, local)
    kept = edges[:1]
    for edge, following in pairwise([*edges[1:], edges[-1] + chunk + 1]):
        if following - kept[-1] > chunk:
            kept.append(edge)
    return kept


def _runs(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return spans (start, end) as runs (start, length), sorted by position, with adjacent runs joined."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if runs and sum(runs[-1]) == start:
            runs[-1] = runs[-1][0], end - runs[-1][0]
        else:
            runs.append((start, end - start))
    return tuple(runs)


def _later_cost_more(masks: tuple[tuple[Band, float], ...]) -> bool:
    """Return whether, summed over all masks, the last query of a long document costs at least as much as the first."""
    side = lambda lag: float(2**40) if lag is None else lag
    return sum(cost * (side(mask.hi) - side(None if mask.lo is None else -mask.lo)) for mask, cost in masks) >= 0
