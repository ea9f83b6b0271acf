"""The plan of the strategy "direct" in a balanced layout: in one exchange each rank receives the other ranks' keys that it needs.

A rank needs the keys that its queries see. It attends to its own and the received keys in one step, as one shard sorted by
position. For example, documents of 4, 12 and 8 tokens over 4 ranks of 6 tokens, under a causal mask:

    document    A A A A B B B B B B B B B B B B C C C C C C C C
    rank        0 0 0 0 2 2 3 3 3 3 3 3 1 1 0 0 1 1 1 1 2 2 2 2

    rank 0      holds A and the end of B, and receives the rest of B: 2 keys of rank 2, 6 of rank 3, 2 of rank 1
    rank 2      holds the first keys of B and the end of C, and receives the 4 keys of C that rank 1 holds

The documents are those that the layout was made for. If the queries have extents, these documents and the mask decide which keys
travel; otherwise the mask alone decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

from ..runs import Band
from .balanced_layout import BalancedLayout
from .documents import PackedDocuments, unite
from .ring import RingPlan, Runs

Intervals = tuple[tuple[int, int], ...]

PARTS = 8
"""Numbers of keys are rounded up to multiples of a rank's tokens / ``PARTS``, so that few array sizes occur."""


class Stretch(NamedTuple):
    """The keys at ``length`` positions from ``start`` on, held by the rank ``owner`` from index ``first`` of its shard on."""

    start: int
    length: int
    owner: int
    first: int


@dataclass(frozen=True)
class NeededPlan(RingPlan):
    """The plan of "direct" in a balanced layout: one step at shift 0, on own and received keys by position (the *shard of the
    step*). In two steps the transfer could overlap, but partial results in float32 would take longer than the transfer."""

    by_documents: bool = False
    """True if the documents of the layout limit what queries see."""

    def received(self, reader: int) -> tuple[Stretch, ...]:
        """Return the keys that ``reader`` receives, in order of position."""
        return self._received[reader]

    def sent(self, owner: int, reader: int) -> tuple[Stretch, ...]:
        """Return the keys that ``owner`` sends to ``reader``, in order of position."""
        return tuple(each for each in self._received[reader] if each.owner == owner)

    def tokens(self, owner: int, reader: int) -> int:
        return sum(each.length for each in self.sent(owner, reader))

    @cached_property
    def most_tokens(self) -> int:
        """Return the most keys that a rank sends to another, rounded up as ``PARTS`` says. In JAX each transfer has this size."""
        ranks = range(self.ranks)
        return self._padded(max(self.tokens(owner, reader) for owner in ranks for reader in ranks))

    def busiest(self, even: bool = False) -> int:
        """Return the most keys that one rank receives or sends; with ``even``, ``most_tokens`` to each other rank, as in JAX."""
        return (self.ranks - 1) * self.most_tokens if even else self._busiest

    @cached_property
    def _busiest(self) -> int:
        received = [sum(each.length for each in parts) for parts in self._received]
        sent = Counter[int]()
        for each in chain.from_iterable(self._received):
            sent[each.owner] += each.length
        return max(*received, *sent.values(), 0)

    def pairs(self, rank: int) -> float:
        """Return the number of visible (query, key) pairs of a rank's queries, as the mean over the layout's batch rows."""
        assert isinstance(self.layout, BalancedLayout)
        packed = _pack_documents(self.layout, self.mask, self.kv_length, self.by_documents)
        return sum(map(packed.cost, self.layout.held(rank))) / len(packed.rows)

    def capacity(self, rank: int) -> int:
        """Return the number of keys that ``rank`` attends to, padding included. It is at least 1 if some rank receives keys."""
        if not self.exchanges:
            return self.kv_local
        return self._padded(max(sum(end - first for first, end in self.available(rank)), 1))

    @cached_property
    def most_capacity(self) -> int:
        """Return the largest ``capacity`` of a rank. In JAX the shard of the step has this size on every rank."""
        return max(map(self.capacity, range(self.ranks)))

    def _padded(self, tokens: int) -> int:
        part = -(-self.kv_local // PARTS)
        return -(-tokens // part) * part

    @property
    def _received(self) -> tuple[tuple[Stretch, ...], ...]:
        assert isinstance(self.layout, BalancedLayout)
        return _stretches(self.layout, self.mask, self.kv_length, self.by_documents)

    @property
    def travels(self) -> bool:
        """Return True even if no rank receives keys, so that k and v are always packed into one array."""
        return True

    @property
    def exchanges(self) -> bool:
        return any(self._received)

    @property
    def shifts(self) -> tuple[int, ...]:  # type: ignore[override]  # a cached property of RingPlan
        return (0,)

    @cached_property
    def k_runs(self) -> tuple[Runs, ...]:  # type: ignore[override]
        """Return each rank's runs (base in the shard of the step, length, start, stride), and empty ones up to equally many."""
        if not self.exchanges:  # the step has this rank's shard as it is
            return tuple(self._runs(rank, self.kv_local, self.kv_length) for rank in range(self.ranks))
        by_rank = [self._runs_of(self.available(rank)) for rank in range(self.ranks)]
        most = max(map(len, by_rank))
        return tuple(runs + ((0, 0, 0, 1),) * (most - len(runs)) for runs in by_rank)

    @property
    def k_slot(self) -> int:
        return self.most_capacity

    @staticmethod
    def _runs_of(intervals: Intervals) -> Runs:
        bases = accumulate((end - first for first, end in intervals), initial=0)
        return tuple((base, end - first, first, 1) for base, (first, end) in zip(bases, intervals, strict=False))

    def available(self, rank: int) -> Intervals:
        """Return the positions (first, end) of the keys that a rank attends to, as disjoint intervals in order."""
        return tuple(unite((each.start, each.start + each.length) for each in (*self.held(rank), *self.received(rank))))

    def places(self, rank: int) -> list[tuple[int, Stretch]]:
        """Return (base in the shard of the step, stretch) for each stretch that ``rank`` attends to, by position."""
        stretches = sorted((*self.held(rank), *self.received(rank)))
        return [*zip(accumulate((each.length for each in stretches), initial=0), stretches, strict=False)]

    def held(self, rank: int) -> tuple[Stretch, ...]:
        """Return the runs of a rank's own keys in shard order. Padding is cut off."""
        assert isinstance(self.layout, BalancedLayout)
        return _runs_of_tokens(self.layout)[rank]


def check_available(extents: Any, plan: NeededPlan, rank: int) -> None:
    """Check that ``rank`` has all keys that its queries may see by ``extents``, int [batch, seq_local, 2] on the host."""
    if (why := unavailable(extents, plan, rank)) is not None:
        raise ValueError(
            f'strategy="direct" sends the keys of the documents that the layout was made for, and {why}: pass the extents and '
            'the layout of one shard_batch, or strategy="ring"'
        )


def unavailable(extents: Any, plan: NeededPlan, rank: int) -> str | None:
    """Describe the first query whose extent, int [batch, seq_local, 2], holds a key that ``rank`` lacks, or return None."""
    import numpy as np

    assert isinstance(plan.layout, BalancedLayout)
    at = np.concatenate([np.arange(start, start + length) for start, length in plan.layout.runs[rank]])
    runs = plan.available(rank)
    low = 0 if plan.mask.hi is None else at - plan.mask.hi
    high = plan.kv_length if plan.mask.lo is None else at - plan.mask.lo + 1
    first, end = np.maximum(extents[..., 0], low), np.minimum(np.minimum(extents[..., 1], high), plan.kv_length)
    starts, ends = np.array([(0, 0), *runs]).T  # an empty run comes first, so that each extent has a run at or before it
    before = np.searchsorted(starts, first, side="right") - 1
    inside = end <= ends[before]
    outside = (first < end) & (at < plan.length) & ~inside
    if not outside.any():
        return None
    row, query = (int(x[0]) for x in outside.nonzero())
    extent = [int(x) for x in extents[row, query]]
    return f"the query at position {at[query]} of row {row} has extent {extent}, which reaches beyond them"


@lru_cache(maxsize=64)  # an entry per batch of packed documents, some 50 KB for 8 ranks
def _stretches(layout: BalancedLayout, mask: Band, length: int, by_documents: bool) -> tuple[tuple[Stretch, ...], ...]:
    """Return for each rank the keys of other ranks that its queries see, by position; ``length``: keys without padding."""
    packed, held = _pack_documents(layout, mask, length, by_documents), sorted(chain.from_iterable(_runs_of_tokens(layout)))
    starts = [each.start for each in held]
    found = []
    for reader in range(layout.ranks):
        received = []
        for first, end in packed.seen(layout.held(reader)) if length else []:
            at = max(bisect_right(starts, first) - 1, 0)
            while at < len(held) and held[at].start < end:
                each = held[at]
                begin, stop = max(first, each.start), min(end, each.start + each.length)
                if each.owner != reader and begin < stop:
                    received.append(Stretch(begin, stop - begin, each.owner, each.first + begin - each.start))
                at += 1
        found.append(tuple(received))
    return tuple(found)


@lru_cache(maxsize=8)
def _pack_documents(layout: BalancedLayout, mask: Band, length: int, by_documents: bool) -> PackedDocuments:
    return PackedDocuments(layout.documents if by_documents and layout.documents else ((length,),), ((mask, 1),))


@lru_cache(maxsize=8)  # the plans of all masks, and all methods of a plan, share an entry
def _runs_of_tokens(layout: BalancedLayout) -> tuple[tuple[Stretch, ...], ...]:
    """Return each rank's runs in shard order. Padding is cut off, and a run of padding alone is left out."""
    return tuple(
        tuple(Stretch(start, length, owner, base) for base, length, start, _ in layout.padded_runs(owner) if length)
        for owner in range(layout.ranks)
    )
