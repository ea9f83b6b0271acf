"""The plan of ``order="global"``: each rank computes on the tokens of all ranks in order of position, in one run from 0 on.

A tile holds the same positions on any number of ranks, and a rank computes each tile in which it owns a token, whole. So all its
results are those of one rank, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..layouts import named
from .balanced_layout import BalancedLayout
from .joined import JoinedPlan, Runs


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
        import numpy as np

        of_rank = lambda rank: (
            self.layout.positions(rank)
            if isinstance(self.layout, BalancedLayout)
            else np.concatenate([run.positions() for run in named(self.order)(rank, self.ranks, local)])
        )
        return np.array([of_rank(rank) for rank in range(self.ranks)], np.int32)
