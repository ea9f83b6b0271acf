"""How k/v travel round the ring, and their gradients home: one batched send+receive per hop, in flight during the compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.plan import RingPlan
from ring_attn_core.runs import Row

from .keys import Keys
from .score import Gradients

T = TypeVar("T")
Group = dist.ProcessGroup | None
"""A ring: a process group, or None for a ring of one where torch.distributed is not in use."""


def circulate(keys: Keys, plan: RingPlan, group: Group) -> Iterator[Step]:
    """Yield a step for every shift of the plan, each with the keys that started on ``rank - shift``."""
    hops = (*plan.hops, 0)
    travelling = None
    for shift, hop in zip(plan.shifts, hops, strict=True):
        step = Step(keys, travelling, plan, group, shift, hop)
        yield step
        keys, travelling = step.next_keys, step.travelling


class Step:
    """One step of the ring. ``keys`` and ``rows`` are what to compute on now; ``last`` is true at the last shift."""

    def __init__(self, keys: Keys, travelling: Transfer | None, plan: RingPlan, group: Group, shift: int, hop: int) -> None:
        self.keys = keys
        self.last = shift == plan.shifts[-1]
        self.rows = rows(plan, group, shift)
        self._next = None if self.last else send(keys, hop, group)
        self.travelling = travelling
        self._onward = plan.home if self.last else hop
        self._group = group

    @property
    def next_keys(self) -> Keys:
        """The keys of the next step, waited for only when the next step asks."""
        return self.keys if self._next is None else Keys(*self._next.wait())

    def settle(self, state: T) -> T:
        """Return ``state``: eager execution is ordered already."""
        return state

    def arrived(self) -> Tensor | None:
        """The gradients of ``keys`` from the ranks that they have passed, waited for; None at the first step."""
        return None if self.travelling is None else self.travelling.wait()[0]

    def send_home(self, dkv: Gradients) -> None:
        """Send on the gradients of ``keys``, what arrived and this rank's part; after the last step, home."""
        self.travelling = send((dkv,), self._onward, self._group)

    def home(self) -> Gradients:
        """The gradients of this rank's own k/v, from every rank that saw them."""
        assert self.last and self.travelling is not None
        (arrived,) = self.travelling.wait()
        return arrived


Arrays = tuple[Any, ...]


class Transfer:
    """Arrays on their way: ``wait`` returns what arrives, and what was sent may be reused from then on."""

    def __init__(self, arriving: Arrays, works: list[dist.Work], sent: Arrays) -> None:
        self._arriving, self._works, self._sent = arriving, works, sent

    def wait(self) -> Any:
        for work in self._works:
            work.wait()
        return self._arriving


def send(arrays: Arrays, hop: int, group: Group) -> Transfer:
    """What the rank ``hop`` before this one holds, while this rank's goes to the one ``hop`` after. A hop of 0 sends nothing.

    All arrays that are not None go in one batch.
    """
    if hop == 0:
        return Transfer(arrays, [], arrays)
    rank, ranks = rank_in(group), ranks_of(group)
    to, from_ = (rank + hop) % ranks, (rank - hop) % ranks
    sent = tuple(x if x is None else x.contiguous() for x in arrays)
    arriving = tuple(x if x is None else torch.empty_like(x) for x in sent)
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x in sent if x is not None]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=from_) for x in arriving if x is not None]
    return Transfer(arriving, dist.batch_isend_irecv(operations), sent)


def rows(plan: RingPlan, group: Group, shift: int) -> list[list[Row]]:
    """[q_runs][k_runs]: what this rank may see at ``shift``."""
    return plan.rows(rank_in(group), shift)


def rank_in(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def ranks_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)
