"""The plan of a ring over two levels: inner rings within each host, and an outer ring between hosts.

    host 0     host 1        the path of the keys of rank 0, on hosts of n = 2 ranks
    0 -> 1     2 -> 3        first the keys go from rank 0 to 1 (inner ring of host 0), and at the same time to rank 2 of host 1
    |          ^             then they go from rank 2 to 3 (inner ring of host 1)
    +----------+

The *place* of a rank is its index within its host. Let keys start at place ``p`` of host ``h``, cross ``outer`` hosts, and move
on by ``inner`` ranks inside a host. They are then at place ``(p + inner) % n`` of host ``(h + outer) % hosts``. A shard crosses
to each host at most once, during the steps of an inner ring (double ring: LoongTrain, arXiv:2406.18485).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from ..validation import in_words, is_integer
from .ring import RingPlan

Rank = TypeVar("Rank")


@dataclass(frozen=True, kw_only=True)
class TwoLevel:
    """The strategy "two_level" on hosts of ``ranks`` consecutive ranks each.

    Keys go round an inner ring inside each host, and from host to host on an outer ring.

    ``ranks`` must divide the number of ranks of the ring. Raise ValueError if ``ranks`` is not an int of at least 1.
    """

    ranks: int

    def __post_init__(self) -> None:
        if not is_integer(self.ranks) or self.ranks < 1:
            raise ValueError(f"TwoLevel(ranks=...) is the number of ranks of a host, at least 1, got {in_words(self.ranks)}")
        object.__setattr__(self, "ranks", int(self.ranks))

    def __str__(self) -> str:
        return f"TwoLevel(ranks={self.ranks})"


class InnerRing(NamedTuple):
    """The steps of one inner ring. ``outer``: hosts that its keys have crossed. ``inner``: the rising shift of each step in a
    host. ``crossing``: hosts that the keys cross during these steps, 0 in the last ring."""

    outer: int
    inner: tuple[int, ...]
    crossing: int

    @property
    def key_hops(self) -> int:
        """Return the hops of keys inside a host: one between steps, and one before the first unless its shift is 0."""
        return len(self.inner) - 1 + (self.inner[0] > 0)

    @property
    def gradient_hops(self) -> int:
        """Return the hops of gradients inside a host: one between steps, and one home unless the last shift is 0."""
        return len(self.inner) - 1 + (self.inner[-1] > 0)


@dataclass(frozen=True)
class TwoLevelPlan(RingPlan):
    """The plan of the strategy "two_level". ``host_ranks``: ranks per host, a divisor of ``ranks``."""

    host_ranks: int = 1

    def shift(self, rank: Rank, outer: int, inner: int) -> Rank:
        """Return the ranks from ``rank`` (may be traced) back to the owner of its keys, ``outer`` hosts and ``inner`` places."""
        n, host, place = self.host_ranks, rank // self.host_ranks, rank % self.host_ranks  # type: ignore[operator]
        hosts = self.ranks // n
        owner = (host - outer) % hosts * n + (place - inner) % n
        return (rank - owner) % self.ranks  # type: ignore[operator]

    @cached_property
    def inner_rings(self) -> tuple[InnerRing, ...]:
        """Return the inner rings with a step at which some rank may see a key, first the one on each host's own keys."""
        n = self.host_ranks
        needed = {
            outer: tuple(inner for inner in range(n) if (not outer and not inner) or self._seen(outer, inner))
            for outer in range(self.ranks // n)
        }
        outers = [outer for outer, inner in needed.items() if inner]
        crossings = [b - a for a, b in pairwise(outers)] + [0]
        return tuple(InnerRing(outer, needed[outer], crossing) for outer, crossing in zip(outers, crossings, strict=True))

    def _seen(self, outer: int, inner: int) -> bool:
        shifts = ((rank, self.shift(rank, outer, inner)) for rank in range(self.ranks))
        if self.steps is not None:
            return any(shift in self.steps for _, shift in shifts)
        return any(self.area(rank, shift) for rank, shift in shifts)

    @property
    def crossing_home(self) -> int:
        """Return the number of hosts that gradients cross from the host of the last inner ring to the host of the keys' owner."""
        return -self.inner_rings[-1].outer % (self.ranks // self.host_ranks)
