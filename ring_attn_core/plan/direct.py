"""The plan of the strategy "direct": the slices of keys that each rank (the owner) sends to each other rank (the reader).

A run is a part of a shard with positions at a constant stride. At shift s the owner ``rank`` sends a slice of each of its key
runs to the reader ``rank + s``. A slice is the shortest stretch of a run that holds all keys visible to the reader's queries
under the mask. Balanced layouts have a plan of their own, in ``needed.py``.

    causal, zigzag, 4 ranks     shift 1: rank 1 (tokens 2 3 12 13) sends 2 3 to rank 2, whose last query is at 11
    window of 2, contiguous     shift 1: each rank but the last sends its last 2 tokens to the next rank; no other shift
    full                        whole shards
    causal, striped             whole shards, without the last key if the owner's rank is greater than the reader's
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..runs import Band, Run
from .ring import RingPlan


class Slice(NamedTuple):
    """One slice of each owner's shard, sent at one shift: ``lengths[owner]`` tokens from index ``firsts[owner]`` on, unless 0.
    ``end``: on every owner this slice ends at this index or before, and the next of the shift begins there or after."""

    firsts: tuple[int, ...]
    lengths: tuple[int, ...]
    end: int

    def tokens(self, owner: int, even: bool = False) -> int:
        """Return the tokens of this slice that ``owner`` sends; ``even``: ``longest`` unless 0, for JAX's static sizes."""
        return self.longest if even and self.lengths[owner] else self.lengths[owner]

    @property
    def longest(self) -> int:
        """Return the length of the longest slice of any owner: the size that holds every slice if sizes must be static."""
        return max(self.lengths)

    @property
    def even_firsts(self) -> tuple[int, ...]:
        """Return each first index after slices grow to ``longest`` tokens, without exceeding ``end``."""
        return tuple(min(first, self.end - self.longest) for first in self.firsts)

    def meets(self, after: Slice) -> bool:
        """Return whether, in every shard, this slice ends where the slice ``after`` begins, or both are empty."""
        sent = zip(self.firsts, self.lengths, after.firsts, after.lengths, strict=True)
        return all(first + tokens == begin if tokens and more else tokens == more for first, tokens, begin, more in sent)

    def joined(self, after: Slice) -> Slice:
        """Return one slice that covers this slice and ``after``, a slice that begins at the end of this slice."""
        return Slice(self.firsts, tuple(map(sum, zip(self.lengths, after.lengths, strict=True))), after.end)


@dataclass(frozen=True)
class DirectPlan(RingPlan):
    """The plan of the strategy "direct": each owner sends keys straight to the ranks whose queries see these keys."""

    def slices(self, shift: int) -> tuple[Slice, ...]:
        """Return the slices that each owner sends to the rank ``shift`` ranks after it, by increasing index in the shard."""
        return self._slices[shift]

    @cached_property
    def _slices(self) -> dict[int, tuple[Slice, ...]]:
        return {shift: tuple(self._of_shift(shift)) for shift in self.shifts[1:]}

    def _of_shift(self, shift: int) -> list[Slice]:
        """Return the slices sent at this shift, one for each key run in which a reader (``shift`` ranks on) sees some key."""
        found: list[Slice] = []
        for run in range(len(self.k_runs[0])):
            parts = [self._visible(owner, (owner + shift) % self.ranks, run) for owner in range(self.ranks)]
            each = Slice(*zip(*parts, strict=True), end=(run + 1) * self.k_slot)
            if each.longest == 0:
                continue
            if found and found[-1].meets(each):
                each = found.pop().joined(each)
            found.append(each)
        return found

    def sent(self, owner: int, shift: int) -> int:
        """Return the number of tokens that ``owner`` sends at a shift, without computing other owners' slices."""
        reader = (owner + shift) % self.ranks
        return sum(self._visible(owner, reader, run)[1] for run in range(len(self.k_runs[0])))

    def _visible(self, owner: int, reader: int, run: int) -> tuple[int, int]:
        """Return (first index in the shard, length) of the shortest stretch of a key run with all keys that the reader sees."""
        base, *keys = self.k_runs[owner][run]
        seen = (visible_keys(_run(*queries), _run(*keys), self.mask) for _, *queries in self.q_runs[reader])
        some = [(first, end) for first, end in seen if first < end]
        if not some:
            return run * self.k_slot, 0
        first = min(first for first, _ in some)
        return base + first, max(end for _, end in some) - first


def _run(length: int, start: int, stride: int) -> Run:
    return Run(start, length, stride)


def visible_keys(queries: Run, keys: Run, mask: Band) -> tuple[int, int]:
    """Return the interval [first, end) of the keys that some query sees, as indices in the run ``keys``; (0, 0) if none. One of n
    queries sees key j if ``max(0, j + lo) <= min(n - 1, j + hi)``, which means ``-hi <= j <= n - 1 - lo``."""
    band = mask.onto(queries, keys)
    if queries.length == 0 or (band.lo is not None and band.hi is not None and band.lo > band.hi):
        return 0, 0
    first = 0 if band.hi is None else max(0, -band.hi)
    end = keys.length if band.lo is None else min(keys.length, queries.length - band.lo)
    return (first, end) if first < end else (0, 0)
