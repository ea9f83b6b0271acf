"""How k/v travel round the ring, and their gradients home: one batched send+receive per hop, in flight during the compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.plan import RingPlan

T = TypeVar("T")
Group = dist.ProcessGroup | None
"""A ring: a process group, or None for a ring of one where torch.distributed is not in use."""


def circulate(kv: Tensor, plan: RingPlan, group: Group) -> Iterator[Step]:
    """Yield a step for every shift of the plan, each with the k/v that started on ``rank - shift``."""
    hops = (*plan.hops, 0)
    travelling = None
    for shift, hop in zip(plan.shifts, hops, strict=True):
        step = Step(kv, travelling, plan, group, shift, hop)
        yield step
        kv, travelling = step.next_kv, step.travelling


class Step:
    """One step of the ring. ``kv`` and ``rows`` are what to compute on now; ``last`` is true at the last shift."""

    def __init__(self, kv: Tensor, travelling: Transfer | None, plan: RingPlan, group: Group, shift: int, hop: int) -> None:
        self.kv = kv
        self.last = shift == plan.shifts[-1]
        self.rows = plan.rows(rank_in(group), shift)
        self._next = None if self.last else send(kv, hop, group)
        self.travelling = travelling
        self._onward = plan.home if self.last else hop
        self._group = group

    @property
    def next_kv(self) -> Tensor:
        """The k/v of the next step, waited for only when the next step asks."""
        return self.kv if self._next is None else self._next.wait()

    def settle(self, state: T) -> T:
        """Return ``state``: eager execution is ordered already."""
        return state

    def send_home(self, dkv: Tensor) -> None:
        """Add this rank's part to the gradients that arrived for ``kv`` and send them on; after the last step, home."""
        total = dkv if self.travelling is None else dkv.add_(self.travelling.wait())
        self.travelling = send(total, self._onward, self._group)

    def home(self) -> Tensor:
        """The gradients of this rank's own k/v, from every rank that saw them."""
        assert self.last and self.travelling is not None
        return self.travelling.wait()


class Transfer:
    """An array on its way: ``wait`` returns what arrives, and what was sent may be reused from then on."""

    def __init__(self, arriving: Tensor, works: list[dist.Work], sent: Tensor) -> None:
        self._arriving, self._works, self._sent = arriving, works, sent

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._arriving


def send(x: Tensor, hop: int, group: Group) -> Transfer:
    """What the rank ``hop`` before this one holds, while this rank's goes to the one ``hop`` after. A hop of 0 sends nothing."""
    if hop == 0:
        return Transfer(x, [], x)
    rank, ranks = rank_in(group), ranks_of(group)
    x, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + hop) % ranks),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - hop) % ranks),
    ]
    return Transfer(arriving, dist.batch_isend_irecv(operations), x)


def rank_in(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def ranks_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)
