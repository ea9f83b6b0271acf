"""The sizes that determine the time of a call: the visible pairs of each rank and step, and the bytes of a shard."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ring_attn_core.plan.direct import visible_keys
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.runs import Band, Run

from .gpus import Machine

SAMPLE = 12
"""Largest number of ranks whose work is counted; the slowest of these ranks stands for all ranks."""

ITEM, WIDE = 2, 4
"""The bytes of an element of q, k and v, and of an element in the accumulation dtype."""


class Seconds(NamedTuple):
    """The predicted time of a call, in seconds."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Load:
    """The sizes that determine the time of a call of one batch row. ``host_ranks``: consecutive ranks per host."""

    plan: RingPlan
    heads: int
    kv_heads: int
    head_dim: int
    host_ranks: int

    @property
    def hosts(self) -> int:
        return -(-self.plan.ranks // self.host_ranks)

    @property
    def local(self) -> int:
        """Return the number of ranks that share the links of a host."""
        return min(self.plan.ranks, self.host_ranks)

    @property
    def kv(self) -> int:
        """Return the number of elements in a shard of keys and values."""
        return self.plan.kv_local * self.kv_heads * 2 * self.head_dim

    @property
    def keys(self) -> int:
        """Return the bytes of a shard of keys and values."""
        return self.kv * ITEM

    @property
    def gradients(self) -> int:
        """Return the bytes of the gradients of a shard of keys and values."""
        return self.kv * WIDE

    @property
    def q(self) -> int:
        """Return the number of (query, head) pairs in a shard."""
        return self.plan.seq_local * self.heads

    @cached_property
    def sample(self) -> tuple[int, ...]:
        """Return the sampled ranks, whose work is counted: the first, the last, and others evenly spread between them."""
        ranks, some = self.plan.ranks, min(self.plan.ranks, SAMPLE)
        return tuple(sorted({i * (ranks - 1) // max(some - 1, 1) for i in range(some)}))

    @cached_property
    def _areas(self) -> dict[tuple[int, int], int]:
        return {}

    def area(self, rank: int, shift: int) -> int:
        """Return the number of visible pairs of a rank at a shift. Results are cached."""
        if (rank, shift) not in self._areas:
            self._areas[rank, shift] = self.plan.area(rank, shift)
        return self._areas[rank, shift]

    def queries(self, rank: int, shift: int) -> int:
        """Return the queries of a rank to process at a shift: in each run from the first to the last that sees a key."""
        plan, mask = self.plan, self.plan.mask
        turned = Band(*(None if side is None else -side for side in (mask.hi, mask.lo)))
        runs = [Run(start, length, stride) for _, length, start, stride in plan.k_runs[(rank - shift) % plan.ranks]]
        total = 0
        for _, length, start, stride in plan.q_runs[rank]:
            seen = [visible_keys(keys, Run(start, length, stride), turned) for keys in runs]
            some = [(first, end) for first, end in seen if first < end]
            total += max((end for _, end in some), default=0) - min((first for first, _ in some), default=0)
        return total

    def operations(self, pairs: float) -> tuple[float, float]:
        """Return the floating-point operations (forward, backward) of all heads with ``pairs`` under the mask."""
        each = 2 * self.heads * self.head_dim * pairs
        return 2 * each, 5 * each

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
        passes = 5 / 7 if self.head_dim > 128 else 1.0
        return machine.backward_rate * min(1.0, (self.head_dim + 64) / 192) * passes
