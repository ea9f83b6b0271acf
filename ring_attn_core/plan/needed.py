"""The plan of the strategy "direct" in a balanced layout: in one exchange each rank receives the other ranks' keys that it sees.

A rank attends to its own keys while the keys of other ranks arrive. Then it attends to the received keys, sorted by position, as
one shard. Documents of 4, 12 and 8 tokens over 4 ranks of 6 tokens, under a causal mask:

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

from ..runs import Band, Run
from .balanced_layout import BalancedLayout
from .documents import PackedDocuments
from .ring import RingPlan, Rows, Runs, recent_rows

PARTS = 8
"""A number of received keys is padded to a multiple of 1 / ``PARTS`` of a rank's tokens, so that few array sizes occur."""


class Stretch(NamedTuple):
    """Consecutive positions, from ``start`` on, whose keys ``owner`` sends to another rank.

    ``first``: the index of the first of these keys in the owner's shard.
    """

    start: int
    length: int
    owner: int
    first: int


@dataclass(frozen=True)
class NeededPlan(RingPlan):
    """The plan of the strategy "direct" in a balanced layout.

    At shift 0 a rank attends to its own keys, at shift 1 to all keys that it receives. If no rank receives any, there is only
    shift 0.
    """

    by_documents: bool = False
    """True if the documents of the layout limit what queries see."""

    def received(self, reader: int) -> tuple[Stretch, ...]:
        """Return the keys that ``reader`` receives, in order of position."""
        return self._received[reader]

    def sent(self, owner: int, reader: int) -> tuple[Stretch, ...]:
        """Return the keys that ``owner`` sends to ``reader``, in order of position."""
        return tuple(each for each in self._received[reader] if each.owner == owner)

    def tokens(self, owner: int, reader: int) -> int:
        """Return the number of keys that ``owner`` sends to ``reader``."""
        return sum(each.length for each in self.sent(owner, reader))

    @cached_property
    def most_tokens(self) -> int:
        """Return the largest number of keys that one rank sends to another, padded: the size of every transfer in JAX."""
        ranks = range(self.ranks)
        return self._padded(max(self.tokens(owner, reader) for owner in ranks for reader in ranks))

    def busiest(self, even: bool = False) -> int:
        """Return the largest number of keys that one rank receives or sends.

        With ``even``, each rank sends ``most_tokens`` keys to each other rank, as in JAX.
        """
        return (self.ranks - 1) * self.most_tokens if even else self._busiest

    @cached_property
    def _busiest(self) -> int:
        received = [sum(each.length for each in parts) for parts in self._received]
        sent = Counter[int]()
        for each in chain.from_iterable(self._received):
            sent[each.owner] += each.length
        return max(*received, *sent.values(), 0)

    def pairs(self, rank: int) -> float:
        """Return the number of visible (query, key) pairs of a rank's queries, as the mean over the layout's batch rows.

        The mask limits what a query sees, and so do the documents if ``by_documents`` is True.
        """
        assert isinstance(self.layout, BalancedLayout)
        packed = _packed(self.layout, self.mask, self.kv_length, self.by_documents)
        return sum(map(packed.cost, self.layout.held(rank))) / len(packed.rows)

    def capacity(self, reader: int) -> int:
        """Return the number of keys that ``reader`` receives, padding included; 0 if it receives no key."""
        return self._padded(sum(each.length for each in self._received[reader]))

    @cached_property
    def most_capacity(self) -> int:
        """Return the largest ``capacity`` of a rank. In JAX the received shard of every rank has this size."""
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

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """Return (0, 1), or (0,) if no rank receives keys."""
        return (0, 1) if any(self._received) else (0,)

    def rows(self, rank: int, shift: int) -> Rows:
        """Return, as ``[q_runs][k_runs]``, the ``Row`` of each pair of runs: own keys at shift 0, received keys at shift 1."""
        if shift == 0:
            return super().rows(rank, 0)
        return recent_rows(self.q_runs[rank], self.arrived_runs(rank), self.band, self.q_slot, self.capacity(rank))

    def area(self, rank: int, shift: int) -> int:
        """Return the number of (query, key) pairs that ``rank`` computes at ``shift`` if only the mask hides keys.

        The limits of documents are ignored here; ``pairs`` respects them.
        """
        if shift == 0:
            return super().area(rank, 0)
        return sum(
            self.mask.onto(Run(q_start, q_len, 1), Run(k_start, k_len, 1)).area(q_len, k_len)
            for _, q_len, q_start, _ in self.q_runs[rank]
            for _, k_len, k_start, _ in self.arrived_runs(rank)
        )

    def available(self, rank: int) -> list[tuple[int, int]]:
        """Return the positions (first, end) whose keys a rank holds or receives, as disjoint intervals in order."""
        assert isinstance(self.layout, BalancedLayout)
        own = [(run.start, run.start + run.length) for run in self.layout.held(rank)]
        return _merged(sorted([*own, *((each.start, each.start + each.length) for each in self.received(rank))]))

    def arrived_runs(self, rank: int) -> Runs:
        """Return the (base, length, start, stride) of each run of consecutive positions among the received keys.

        ``base``: offset in the received shard. ``start``: first position. ``stride``: 1.
        """
        return _runs(self.received(rank))


def check_available(extents: Any, plan: NeededPlan, rank: int) -> None:
    """Raise ValueError if a query of ``rank`` may see a key that the rank neither holds nor receives.

    ``extents``: int [batch, seq_local, 2] on the host, first and end (exclusive) of the key positions that each query may see.
    """
    if (why := unavailable(extents, plan, rank)) is not None:
        raise ValueError(
            f'strategy="direct" sends the keys of the documents that the layout was made for, and {why}: pass the extents and '
            'the layout of one shard_batch, or strategy="ring"'
        )


def unavailable(extents: Any, plan: NeededPlan, rank: int) -> str | None:
    """Return in words which query of ``rank`` may see a key that the rank neither holds nor receives, or None.

    That happens if the extents belong to other documents than those that the layout was made for. ``extents``: int
    [batch, seq_local, 2] on the host, the first and end (exclusive) of the key positions that each query may see.
    """
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
    """Return for each rank the keys of other ranks that its queries see, in order of position.

    ``length``: number of keys without padding. ``by_documents``: True if a query sees keys of its own document only.
    """
    packed, held = _packed(layout, mask, length, by_documents), _held(layout)
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
def _packed(layout: BalancedLayout, mask: Band, length: int, by_documents: bool) -> PackedDocuments:
    return PackedDocuments(layout.documents if by_documents and layout.documents else ((length,),), ((mask, 1),))


@lru_cache(maxsize=256)
def _runs(received: tuple[Stretch, ...]) -> tuple[tuple[int, int, int, int], ...]:
    """Return the runs of the received keys as ``arrived_runs`` does: (base, length, start, stride) of consecutive positions."""
    runs = _merged([(each.start, each.start + each.length) for each in received])
    bases = accumulate((end - first for first, end in runs), initial=0)
    return tuple((base, end - first, first, 1) for base, (first, end) in zip(bases, runs, strict=False))


def _held(layout: BalancedLayout) -> list[Stretch]:
    """Return the runs of all ranks in order of position. Padding is cut off, and a run of padding alone is left out."""
    held = []
    for owner in range(layout.ranks):
        held += [Stretch(start, length, owner, base) for base, length, start, _ in layout.padded_runs(owner) if length]
    return sorted(held)


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent intervals (first, end) of a sorted list of disjoint intervals."""
    merged: list[tuple[int, int]] = []
    for first, end in intervals:
        if merged and merged[-1][1] == first:
            first = merged.pop()[0]
        merged.append((first, end))
    return merged
