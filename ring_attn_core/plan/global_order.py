"""The plan of ``order="global"``: each rank computes on the tokens of all ranks in order of position, in one run from 0 on.

A tile holds the same positions on any number of ranks, and a rank computes each tile in which it owns a token, whole. So all its
results are those of one rank, to the bit. The GPU kernels cut tiles from the start of a run, so they compute on ``OwnRuns``: the
runs of a rank, extended to multiples of ``TILE`` tokens at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..layouts import find_layout
from ..runs import Band
from .balanced_layout import BalancedLayout
from .joined import JoinedPlan, Runs
from .ring import Rows, rows_of

TILE = 128
"""The sizes of all tiles of queries and of keys of the GPU kernels divide this number of tokens."""

CUTS = 8
"""In a balanced layout, whose runs have any length, a rank's tiles are cut to at most this many full slots, and the rests."""


class OwnRuns(NamedTuple):
    """For each rank runs (base, length, start, 1) of whole tiles, which hold all its tokens, each in a slot of ``slot`` tokens.
    ``rows``: the ``Row`` of each of these runs and the other side's only run. A position may lie in two runs of a rank."""

    slot: int
    runs: Runs
    rows: tuple[Rows, ...]

    @property
    def runs_and_tokens(self) -> tuple[int, int]:
        """Return the number of runs of a rank, and of the tokens in their slots."""
        return len(self.runs[0]), self.slot * len(self.runs[0])


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

    @property
    def band_of_one_run(self) -> None:
        """Return None: the runs hold positions in a balanced layout too."""
        return None

    @cached_property
    def blanks(self) -> bool:
        """Return whether some query may be blank; there is no padding, so this does not depend on the number of ranks."""
        return not self.length or self.steps is not None or not self._all_meet(self.mask, self.length, self.kv_length)

    @cached_property
    def blank_keys(self) -> bool:
        band_of_keys = Band(*(None if side is None else -side for side in (self.mask.hi, self.mask.lo)))
        return not self.kv_length or self.steps is not None or not self._all_meet(band_of_keys, self.kv_length, self.length)

    @cached_property
    def own_queries(self) -> OwnRuns | None:
        """Return the runs on which the kernels compute results of queries; None if they are the only run, of whole tiles."""
        slot, runs = self._own(self.seq_local, self.length)
        rows = tuple(rows_of(q_runs, self.k_runs[0], self.band, slot, self.k_slot) for q_runs in runs)
        return None if runs[0] == self.q_runs[0] and slot == self.q_slot else OwnRuns(slot, runs, rows)

    @cached_property
    def own_keys(self) -> OwnRuns | None:
        slot, runs = self._own(self.kv_local, self.kv_length)
        rows = tuple(rows_of(self.q_runs[0], k_runs, self.band, self.q_slot, slot) for k_runs in runs)
        return None if runs[0] == self.k_runs[0] and slot == self.k_slot else OwnRuns(slot, runs, rows)

    def own_at(self, places: Sequence[int]) -> OwnRuns:
        """Return the runs of one rank that owns the queries at these positions, at least one."""
        tiles = _merge([(tile, tile + 1) for tile in {place // TILE for place in places}])
        slot = max(last - first for first, last in tiles)
        runs = _runs_of([tiles], slot, self.length)
        return OwnRuns(slot * TILE, runs, (rows_of(runs[0], self.k_runs[0], self.band, slot * TILE, self.k_slot),))

    def _own(self, local: int, length: int) -> tuple[int, Runs]:
        """Return the size of a slot and the runs of ``OwnRuns``."""
        found = [[(s // TILE, -(-(s + (n - 1) * stride + 1) // TILE)) for _, n, s, stride in self._runs(rank, local, length) if n]
                 for rank in range(self.ranks)]  # fmt: skip
        slot = max((last - first for tiles in found for first, last in tiles), default=1)
        if isinstance(self.order, BalancedLayout):
            found = [_merge(tiles) for tiles in found]
            slot = -(-max(sum(last - first for first, last in tiles) for tiles in found) // CUTS) or 1
            found = [[(at, min(at + slot, last)) for first, last in tiles for at in range(first, last, slot)] for tiles in found]
        return slot * TILE, _runs_of(found, slot, length)

    def _places(self, local: int) -> Any:
        import numpy as np

        places = lambda rank: (
            self.layout.positions(rank)
            if isinstance(self.layout, BalancedLayout)
            else np.concatenate([run.positions() for run in find_layout(self.order)(rank, self.ranks, local)])
        )
        return np.array([places(rank) for rank in range(self.ranks)], np.int32)


def _runs_of(found: Sequence[Sequence[tuple[int, int]]], slot: int, length: int) -> Runs:
    """Return the runs of ``OwnRuns`` from each rank's ranges (first, last) of at most ``slot`` tiles."""
    most = max(1, *map(len, found))
    runs = []
    for tiles in found:
        padded = [*tiles, *[(0, 0)] * (most - len(tiles))]
        ends = [(first * TILE, min(last * TILE, length)) for first, last in padded]
        runs.append(tuple((i * slot * TILE, end - start, start, 1) for i, (start, end) in enumerate(ends)))
    return tuple(runs)


def _merge(tiles: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (first, last) of tiles in ascending order, those that meet as one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(tiles):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged
