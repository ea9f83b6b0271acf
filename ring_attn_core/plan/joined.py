"""The plans of "gather", "ulysses" and ``order="global"``, whose ranks compute on the joined shards of a group of ranks.

In the global order each rank computes on the tokens of all ranks by position, in one run from 0 on. A tile holds the same
positions on any number of ranks, and a rank computes each tile in which it owns a token, whole. So all its results are those of
one rank, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..layouts import named
from ..lazy_numpy import np
from .balanced_layout import BalancedLayout
from .ring import RingPlan
from .ulysses import HeadSplit

Runs = tuple[tuple[tuple[int, int, int, int], ...], ...]


@dataclass(frozen=True)
class JoinedPlan(RingPlan):
    """The plan of a ring in which each rank computes on the joined shards of a group, ``q_shards`` and ``k_shards`` of them. At
    shift s, a multiple of ``k_shards``, rank r works on the keys of the group of rank r - s; ``seq_local``, ``kv_local`` and
    ``positions`` refer to single shards. In a balanced layout the joined shards form one slot in order of position."""

    q_shards: int = 1  # type: ignore[misc]  # a constant of RingPlan
    k_shards: int = 1  # type: ignore[misc]
    head_split: HeadSplit | None = None  # type: ignore[misc]

    @cached_property
    def q_runs(self) -> Runs:
        """Return each rank's query runs (base, length, start, stride), as in ``RingPlan``; ``base``: offset in joined shards."""
        return self._joined(super().q_runs, self.q_shards, self.seq_local)

    @cached_property
    def k_runs(self) -> Runs:
        return self._joined(super().k_runs, self.k_shards, self.kv_local)

    def _joined(self, runs: Runs, shards: int, local: int) -> Runs:
        if shards == 1 or not isinstance(self.layout, BalancedLayout):
            return _joined(runs, shards, local)
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
        of_places = {-(-(shift - place) // self.k_shards) for shift in self.steps for place in range(self.k_shards)}
        return tuple(sorted({shift * self.k_shards % self.ranks for shift in of_places}))


def _joined(runs: Runs, shards: int, local: int) -> Runs:
    """Return for each rank the runs of all ranks of its group, with offsets (the first number) counted in the joined shards."""
    groups = [runs[first : first + shards] for first in range(0, len(runs), shards)]
    joined = [tuple((i * local + base, *run) for i, each in enumerate(group) for base, *run in each) for group in groups]
    return tuple(joined[rank // shards] for rank in range(len(runs)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class GlobalPlan(JoinedPlan):
    """The plan of one step on all tokens by position, without padding; ``q_shards`` and ``k_shards`` are all ranks."""

    @cached_property
    def q_runs(self) -> Runs:
        """Return one run for each rank: all queries, by position."""
        return (((0, self.length, 0, 1),),) * self.ranks

    @cached_property
    def k_runs(self) -> Runs:
        return (((0, self.kv_length, 0, 1),),) * self.ranks

    @property
    def q_slot(self) -> int:
        """Return the number of queries, at least 1, because an array of results needs a token for the padding to copy."""
        return max(self.length, 1)

    @property
    def k_slot(self) -> int:
        return max(self.kv_length, 1)

    @property  # not kept: a plan of each balanced layout would hold an array of all tokens
    def q_places(self) -> Any:
        """Return the position of each query of each rank, NumPy int32 [ranks, seq_local]; padding is at ``length`` and above."""
        return self._places(self.seq_local)

    @property
    def k_places(self) -> Any:
        return self._places(self.kv_local)

    def _places(self, local: int) -> Any:
        of_rank = lambda rank: (
            self.layout.positions(rank)
            if isinstance(self.layout, BalancedLayout)
            else np.concatenate([run.positions() for run in named(self.order)(rank, self.ranks, local)])
        )
        return np.array([of_rank(rank) for rank in range(self.ranks)], np.int32)
