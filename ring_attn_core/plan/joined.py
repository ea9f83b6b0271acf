"""The plan of the strategies "gather" and "ulysses", whose ranks compute on the joined shards of a group of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..validation import in_words, is_integer
from .balanced_layout import BalancedLayout
from .ring import RingPlan
from .ulysses import HeadSplit

Runs = tuple[tuple[tuple[int, int, int, int], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Gather:
    """The strategy "gather" in ``groups`` of key heads.

    The keys of the next group travel while the heads of a group are computed, and so do the gradients of the group before.

    ``groups`` must divide the number of key heads. Raise ValueError if ``groups`` is not an int of at least 1.
    """

    groups: int

    def __post_init__(self) -> None:
        if not is_integer(self.groups) or self.groups < 1:
            raise ValueError(f"Gather(groups=...) is the number of groups of key heads, at least 1, got {in_words(self.groups)}")
        object.__setattr__(self, "groups", int(self.groups))

    def __str__(self) -> str:
        return f"Gather(groups={self.groups})"


@dataclass(frozen=True)
class JoinedPlan(RingPlan):
    """The plan of a ring in which each rank computes on the joined shards of a group, ``q_shards`` and ``k_shards`` of them. At
    shift s, a multiple of ``k_shards``, rank r works on the keys of the group of rank r - s; ``seq_local``, ``kv_local`` and
    ``positions`` refer to single shards. In a balanced layout the joined shards form one slot in order of position. ``groups``:
    of key heads, each computed in a step of its own."""

    q_shards: int = 1  # type: ignore[misc]  # a constant of RingPlan
    k_shards: int = 1  # type: ignore[misc]
    head_split: HeadSplit | None = None  # type: ignore[misc]
    groups: int = 1  # type: ignore[misc]

    @cached_property
    def q_runs(self) -> Runs:
        """Return each rank's query runs (base, length, start, stride), as in ``RingPlan``; ``base``: offset in joined shards."""
        return self._joined(super().q_runs, self.q_shards, self.seq_local)

    @cached_property
    def k_runs(self) -> Runs:
        return self._joined(super().k_runs, self.k_shards, self.kv_local)

    def _joined(self, runs: Runs, shards: int, local: int) -> Runs:
        if shards == 1 or not isinstance(self.layout, BalancedLayout):
            return _join(runs, shards, local)
        groups = self.layout.joined(shards)
        return tuple(groups.padded_runs(rank // shards) for rank in range(self.ranks))

    @property
    def q_slot(self) -> int:
        """Return the tokens of a query slot: in a balanced layout all of the joined shards, else of one shard's slot."""
        return super().q_slot * (self.q_shards if isinstance(self.layout, BalancedLayout) else 1)

    @property
    def k_slot(self) -> int:
        return super().k_slot * (self.k_shards if isinstance(self.layout, BalancedLayout) else 1)

    @property
    def travels(self) -> bool:
        """Return True, because each rank needs at least the keys of the other ranks of its group."""
        return True

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """Return the shifts of the steps: 0, and other multiples of ``k_shards`` at which a query of some rank may see a key."""
        if self.steps is None:
            shifts = range(self.k_shards, self.ranks, self.k_shards)
            return (0, *(s for s in shifts if any(self.area(rank, s) for rank in range(0, self.ranks, self.q_shards))))
        places = {-(-(shift - place) // self.k_shards) for shift in self.steps for place in range(self.k_shards)}
        return tuple(sorted({shift * self.k_shards % self.ranks for shift in places}))


def _join(runs: Runs, shards: int, local: int) -> Runs:
    """Return for each rank the runs of all ranks of its group, with offsets (the first number) counted in the joined shards."""
    groups = [runs[first : first + shards] for first in range(0, len(runs), shards)]
    joined = [tuple((i * local + base, *run) for i, each in enumerate(group) for base, *run in each) for group in groups]
    return tuple(joined[rank // shards] for rank in range(len(runs)))  # type: ignore[arg-type]
