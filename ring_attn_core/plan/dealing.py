"""The assignment of items to ranks: equal tokens, nearly equal cost, and few cuts, as ``balanced.py`` explains.

An item is a document, several short documents, or a segment of a tree. A cut parts the tokens that a rank takes from the rest.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from .documents import unite

MIN_CHUNK, MAX_CHUNK = 512, 2048
"""Bounds of the size of a chunk, in tokens. Neighbouring short documents that fit into a chunk are one item (``join_items``).

Fewer items give the ranks fewer runs.
"""

SNAP = 64
"""Largest distance, in tokens, by which a cut inside an item may move to the edge of a document."""

MAX_WHOLE = 4
"""``_Remaining.costly`` also tries to cut directly before the last 1, 2, ... or MAX_WHOLE items, which then stay whole."""

SLACK = 0.004
"""A cut may move only if the rank's cost then deviates from an equal share by at most this fraction of the share."""

AS_QUERIES = 300
"""The cost of a run in addition to the cost of its queries, as a multiple of the cost of its first query.

A run has this cost because tiles at its ends are visible in part only. The times of 60 ranks on an H200
(documents-direct-ring-h200.json) fit 250 queries in the backward, 470 in the forward, and 297 in both.
"""

MAX_UNEQUAL = 0.025
"""The largest deviation of a rank's pairs from an equal share, as a fraction of the share.

A rank gets fewer pairs if its runs cost more than the mean of the ranks (``AS_QUERIES``), and more pairs if they cost less.
"""


class _Item(NamedTuple):
    """Consecutive positions to assign to ranks: a whole item, or the rest of an item after ranks have taken some tokens."""

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
        """Return the number of tokens before each item of ``items``, followed by the number of tokens of all items."""
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
        """Return how many of a rank's ``local`` tokens to take from the costly end, so that its cost is ``share``. Another
        number, which cuts fewer items, is preferred if the cost then deviates by at most ``SLACK * share``."""
        total = self.tokens[-1]
        excess = lambda x: self.cost_of_first(local - x) + self.costs[-1] - self.cost_of_first(total - x) - share
        low, high = 0, local
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if excess(middle) >= 0 else (middle + 1, high)
        x = min((low, max(low - 1, 0)), key=lambda x: abs(excess(x)))
        near = [x - shift for cut in (local - x, total - x) for shift in self._to_edge(cut) if abs(shift) <= SNAP]
        whole = [total - first for first in self.tokens[-1 - MAX_WHOLE : -1]]
        fit = [y for y in (*near, *whole) if 0 <= y <= local and abs(excess(y)) <= SLACK * share]
        cut = lambda y: (self.at(local - y)[1] > 0) + (self.at(total - y)[1] > 0)
        return min(fit, key=lambda y: (cut(y), abs(y - x)), default=x)

    def _to_edge(self, cut: int) -> tuple[int, ...]:
        """Return the tokens from a cut to the previous edge (at most 0) and the next (above 0); (0,) between two items."""
        index, offset = self.at(cut)
        if not offset:
            return (0,)
        item = self.items[index]
        position, after = item.start + offset, bisect_right(self.edges, item.start + offset)
        before = max(item.start, self.edges[after - 1])
        return before - position, min([item.end, *self.edges[after : after + 1]]) - position

    def take(self, cheap: int, costly: int) -> tuple[list[tuple[int, int]], list[_Item]]:
        """Return the position spans (start, end) of the first ``cheap`` and last ``costly`` tokens, and the items that remain."""
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
    """Return each rank's runs (start, length) of nearly equal cost, if later queries of an item cost no less than earlier ones.
    ``cuts``: boundaries of the items. ``edges``: those of documents and tree segments; a cut may move to one at most ``SNAP``
    tokens away. ``as_queries``: a run's cost in its first queries, made even by a second assignment."""
    items, local = sorted(_item(start, end, cost_before) for start, end in pairwise(cuts)), cuts[-1] // ranks
    first = _deal_items(items, edges, cost_before, local, [0.0] * ranks)
    run_costs = [as_queries * sum(cost_before(start + 1) - cost_before(start) for start, _ in runs) for runs in first]
    most = max(max(run_costs) * ranks - sum(run_costs), sum(run_costs) - min(run_costs) * ranks)
    if not most:
        return first
    part = min(1, MAX_UNEQUAL * sum(item.cost for item in items) / most)
    return _deal_items(items, edges, cost_before, local, [cost * part for cost in run_costs])


def _deal_items(
    items: list[_Item], edges: list[int], cost_before: Callable[[int], float], local: int, besides: list[float]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Assign ``local`` tokens to each rank; return the ranks' runs. ``besides``: each rank's cost in addition to its queries."""
    dealt = []
    for rank, own in enumerate(besides[:-1]):
        remaining, left = _Remaining(items, edges, cost_before), besides[rank:]
        costly = remaining.costly(local, (remaining.costs[-1] + sum(left)) / len(left) - own)
        spans, items = remaining.take(local - costly, costly)
        dealt.append(_runs(spans))
    return (*dealt, _runs([(item.start, item.end) for item in items]))


def join_items(edges: list[int], local: int) -> list[int]:
    """Join neighbouring items that together fit a chunk (an eighth of ``local``, within limits), and return the edges left."""
    chunk = min(max(local // 8, MIN_CHUNK), MAX_CHUNK, local)
    kept = edges[:1]
    for edge, following in pairwise([*edges[1:], edges[-1] + chunk + 1]):
        if following - kept[-1] > chunk:
            kept.append(edge)
    return kept


def _runs(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return spans (start, end) as runs (start, length), sorted by position, with adjacent runs joined."""
    return tuple((start, end - start) for start, end in unite(spans))
