"""The attention work of packed documents: the visible pairs of a run of queries, and the keys that these queries see.

Documents follow one another, and a query sees only keys of its own document that the mask leaves visible. With documents of 3, 1
and 4 tokens, then two of padding, under a causal mask:

    position   0  1  2  3  4  5  6  7  8  9
    document   A  A  A  B  C  C  C  C  .  .
    pairs      1  2  3  1  1  2  3  4  0  0

Each batch row may hold different documents: pairs are summed over the rows, and a key counts as seen if a query of any row sees
it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from ..masks import causal, check_mask
from ..runs import Band, Run
from ..validation import as_number, in_words, is_integer

PairCost = Callable[[int], float]
"""A function from a document's length in tokens to the cost of one of its visible pairs."""


def document_rows(documents: Any) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of documents, passed for one row or for each of several, as one tuple for each batch row."""
    if not isinstance(documents, Iterable) or isinstance(documents, str | bytes):
        raise ValueError(f"documents are the lengths of documents in tokens, such as (4096, 1024), got {in_words(documents)}")
    rows = list(documents)
    nested = bool(rows) and all(isinstance(row, Iterable) and getattr(row, "shape", None) != () for row in rows)
    checked = []
    for row in rows if nested else [rows]:
        lengths = tuple(int(tokens) if is_integer(tokens) else tokens for tokens in row)
        wrong = next((tokens for tokens in lengths if not isinstance(tokens, int) or tokens < 1), None)
        if wrong is not None or (nested and not lengths):
            got = "an empty row" if wrong is None else in_words(wrong)
            raise ValueError(f"documents are lengths in tokens, ints of at least 1, of one row or of each of several, got {got}")
        checked.append(lengths)
    return tuple(checked)


@dataclass(frozen=True)
class PackedDocuments:
    """The documents' lengths of each batch row, the masks inside them, and the cost of a visible pair. ``masks``: (mask, cost of
    a pair, such as its number of layers). ``pair_cost``: a factor from a document's length."""

    rows: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[Band, float], ...] = ((causal(), 1),)
    pair_cost: PairCost | None = None

    @classmethod
    def of(cls, documents: Any, mask: Any = None, pair_cost: PairCost | None = None) -> PackedDocuments:
        """Return checked PackedDocuments; ``mask`` is a Band, a mapping of Bands to costs, or None for ``causal()``."""
        weighted = list(mask.items()) if isinstance(mask, Mapping) else [(causal() if mask is None else mask, 1)]
        for band, cost in weighted:
            check_mask(band)
            _check_cost("the cost of a mask's pairs", cost)
        if not weighted:
            raise ValueError("mask is a Band, or a mapping of Bands to the cost of their pairs, got an empty mapping")
        if pair_cost is not None and not callable(pair_cost):
            raise ValueError(f"pair_cost is a function of a document's length, or None, got {in_words(pair_cost)}")
        return cls(document_rows(documents), tuple(weighted), pair_cost)

    @property
    def length(self) -> int:
        return max(sum(row) for row in self.rows)

    @cached_property
    def boundaries(self) -> list[int]:
        return sorted({0, *(end for row in self.rows for end in accumulate(row))})

    @cached_property
    def cost_before(self) -> Callable[[int], float]:
        """Return a function from a position to the cost of all queries before it."""
        parts = [self._row_cost(row, band, cost) for row in self.rows for band, cost in self.masks if cost]
        if len(parts) == 1:
            return parts[0]
        return lambda position: sum(part(position) for part in parts)

    def cost(self, run: Run) -> float:
        """Return the cost of the queries of a run: the number of visible pairs, if a pair costs 1."""
        before = self.cost_before
        if run.stride == 1:
            return before(run.start + run.length) - before(run.start)
        return sum(before(position + 1) - before(position) for position in run.positions())

    def seen(self, runs: Iterable[Run]) -> list[tuple[int, int]]:
        """Return the keys that queries of ``runs`` see, as sorted disjoint intervals (first, end) of positions. A run counts as
        seeing all keys of a document from the first of its first query to the last of its last query."""
        found = []
        for run in runs:
            last = run.start + run.stride * (run.length - 1)
            for row, starts in zip(self.rows, self._starts, strict=True):
                at = max(bisect_right(starts, run.start) - 1, 0)
                while run.length and at < len(row) and starts[at] <= last:
                    queries = _inside(run, starts[at], starts[at + 1])
                    if queries is not None:
                        found.extend(_hull(*queries, starts[at], starts[at + 1], band) for band, _ in self.masks)
                    at += 1
        return unite(found)

    @cached_property
    def _starts(self) -> list[list[int]]:
        """Return, for each row, the first position of each document, followed by the end of the last document."""
        return [list(accumulate(row, initial=0)) for row in self.rows]

    def _row_cost(self, row: tuple[int, ...], band: Band, cost: float) -> Callable[[int], float]:
        """Return a function from a position to the cost of one row's queries before it, under one mask."""
        starts = list(accumulate(row, initial=0))
        pair_costs = [cost * self._checked_cost(tokens) for tokens in row]
        each = [c * band.area(tokens, tokens) for tokens, c in zip(row, pair_costs, strict=True)]
        total, count = list(accumulate(each, initial=0)), len(row)
        plainly_causal = band == causal()

        def before(position: int) -> float:
            at = bisect_right(starts, position) - 1
            if at >= count:
                return total[count]
            queries = position - starts[at]
            pairs = queries * (queries + 1) // 2 if plainly_causal else band.area(queries, row[at])
            return total[at] + pair_costs[at] * pairs

        return before

    def _checked_cost(self, tokens: int) -> float:
        if self.pair_cost is None:
            return 1
        cost = self.pair_cost(tokens)
        _check_cost(f"pair_cost({tokens}), the cost of a pair in a document of {tokens} tokens,", cost)
        return cost


def _check_cost(name: str, cost: Any) -> None:
    number = as_number(cost)
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {in_words(cost)}")


def _inside(run: Run, first: int, end: int) -> tuple[int, int] | None:
    """Return the first and last position of ``run`` within ``first .. end - 1``, or None if the run has no position there."""
    skipped = max(-((run.start - first) // run.stride), 0)
    kept = Run(run.start + skipped * run.stride, max(run.length - skipped, 0), run.stride).before(end)
    return (kept.start, kept.start + kept.stride * (kept.length - 1)) if kept.length else None


def _hull(begin: int, last: int, first: int, end: int, band: Band) -> tuple[int, int]:
    """Return the interval [low, high) of the keys in ``first .. end - 1`` that queries ``begin .. last`` see under ``band``."""
    low = first if band.hi is None else max(first, begin - band.hi)
    high = end if band.lo is None else min(end, last - band.lo + 1)
    return low, max(low, high)


def unite(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return intervals (first, end) as sorted disjoint ones; empty ones are dropped, and adjacent ones joined."""
    united: list[tuple[int, int]] = []
    for first, end in sorted(x for x in intervals if x[0] < x[1]):
        if united and first <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((first, end))
    return united


def count_inside(run: Run, intervals: Sequence[tuple[int, int]]) -> int:
    """Return the number of positions of ``run`` in ``intervals``, a sorted sequence of disjoint intervals [first, end)."""
    below = lambda end: run.before(end).length
    return sum(below(end) - below(first) for first, end in intervals)
