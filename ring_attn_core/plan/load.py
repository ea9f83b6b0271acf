"""The sizes that determine the time of a call: the visible pairs of each rank and step, and the bytes of a shard."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..runs import Band, Run
from .direct import visible_keys
from .machine import Machine
from .needed import NeededPlan
from .ring import RingPlan

SAMPLE = 12
"""Largest number of ranks whose work is counted; the slowest of these ranks stands for all ranks."""


class Seconds(NamedTuple):
    """The predicted time of a call, in seconds."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Load:
    """The sizes that determine the time of a call. ``item``: bytes of an element of q, k and v. ``host_ranks``: consecutive ranks
    per host, 0 if unknown. ``share``: visible pairs per pair under the mask. ``needed``: the plan of "direct" in a balanced
    layout if it certainly sends every visible key. ``even``: ranks send equally many, as in JAX."""

    plan: RingPlan
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    item: int
    host_ranks: int
    share: float = 1.0
    extents: bool = False
    peer_access: bool = False
    needed: NeededPlan | None = None
    even: bool = False

    @property
    def hosts(self) -> int:
        return -(-self.plan.ranks // self.host_ranks) if self.host_ranks else 1

    @property
    def local(self) -> int:
        """Return the number of ranks that share the links of a host; 0 if ``host_ranks`` is unknown."""
        return min(self.plan.ranks, self.host_ranks)

    @property
    def kv(self) -> int:
        """Return the number of elements in a shard of keys and values."""
        return self.batch * self.plan.kv_local * self.kv_heads * (self.head_dim + self.v_dim)

    @property
    def q(self) -> int:
        """Return the number of (query, head) pairs in a shard."""
        return self.batch * self.plan.seq_local * self.heads

    @property
    def wide(self) -> int:
        """Return the bytes per element in the accumulation dtype."""
        return max(4, self.item)

    @cached_property
    def sample(self) -> tuple[int, ...]:
        """Return the sampled ranks, whose work is counted: the first, the last, and others evenly spread between them."""
        ranks, some = self.plan.ranks, min(self.plan.ranks, SAMPLE)
        return tuple(sorted({i * (ranks - 1) // max(some - 1, 1) for i in range(some)}))

    @cached_property
    def _areas(self) -> dict[tuple[int, int], int]:
        return {}

    def area(self, rank: int, shift: int) -> int:
        """Return the number of visible pairs of a rank at a shift. It is an estimate if ``needed`` is set. Results are cached."""
        known = self._areas.get((rank, shift))
        if known is None:
            known = self._areas[rank, shift] = self.plan.area(rank, shift) if self.needed is None else self._part(rank, shift)
        return known

    def _part(self, rank: int, shift: int) -> int:
        """Estimate ``area`` in a balanced layout: pairs in proportion to keys, ``needed.busiest()`` of them over all hops."""
        assert self.needed is not None
        pairs, own = self.needed.pairs(rank), self.plan.kv_local / (self.plan.kv_local + self.needed.busiest())
        return round(pairs * own if shift == 0 else pairs * (1 - own) / max(len(self.plan.hops), 1))

    @cached_property
    def needed_share(self) -> float:
        """Return the keys of the busiest rank under ``needed``, as a fraction of the keys that a rank receives in a ring."""
        assert self.needed is not None
        return self.needed.busiest(self.even) / max(len(self.plan.hops) * self.plan.kv_local, 1)

    def queries(self, rank: int, shift: int) -> int:
        """Return the queries of a rank to process at a shift: in each run from the first to the last that sees a key."""
        plan, mask = self.plan, self.plan.mask
        if self.needed is not None:
            return round(plan.seq_local * min(self.needed_share if shift else 1.0, 1.0))
        turned = Band(*(None if side is None else -side for side in (mask.hi, mask.lo)))
        runs = [Run(start, length, stride) for _, length, start, stride in plan.k_runs[(rank - shift) % plan.ranks]]
        total = 0
        for _, length, start, stride in plan.q_runs[rank]:
            seen = [visible_keys(keys, Run(start, length, stride), turned) for keys in runs]
            some = [(first, end) for first, end in seen if first < end]
            total += max((end for _, end in some), default=0) - min((first for first, _ in some), default=0)
        return total

    def operations(self, pairs: float) -> tuple[float, float]:
        """Return the floating-point operations (forward, backward) of all rows and heads with ``pairs`` under the mask."""
        d, e, each = self.head_dim, self.v_dim, 2 * self.batch * self.heads * self.share * pairs
        return each * (d + e), each * (3 * d + 2 * e)

    def ideal(self, machine: Machine) -> Seconds:
        """Return the time, in seconds, that the mean work of a rank would take in a single launch without transfers."""
        mean = sum(self.area(rank, shift) for rank in self.sample for shift in self.plan.shifts) / len(self.sample)
        forward, backward = self.operations(mean)
        return Seconds(forward / self.forward_rate(machine), backward / self.backward_rate(machine))

    def forward_rate(self, machine: Machine) -> float:
        """Return the forward's operations per second, falling below a head dim of 128: 0.67 at 64 (measured 0.69, 0.81)."""
        return machine.forward_rate * min(1.0, (self.head_dim + 64) / 192)

    def backward_rate(self, machine: Machine) -> float:
        """Return the backward's operations per second; above a head dim of 128 two passes need 7 matrix products instead of 5."""
        passes = 5 / 7 if max(self.head_dim, self.v_dim) > 128 else 1.0
        return machine.backward_rate * min(1.0, (self.head_dim + 64) / 192) * passes
