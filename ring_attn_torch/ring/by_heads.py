"""The passes of ``Gather(groups=n)``: all keys arrive by groups of key heads, and one step computes attention of a group's heads.

    in transfer    keys 1 | keys 2 | keys 3, gradients 1 | keys 4, gradients 2 | ...
    being computed        | 1      | 2                   | 3                   | ...

A step computes on one group's keys of all ranks. Meanwhile those of the next group arrive, and the gradients of the group before
return to the keys' owners, which add them in rank order. Heads are independent, so no state passes from step to step. The key
mask and the key extents of all ranks come with the first group. A rank holds the keys of two groups.

``this`` is the ``RingPass`` of ``loop.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..attend.backend import Backend
from ..attend.keys import Keys, join
from ..attend.launch import align
from ..attend.score import Score
from ..attend.state import Gradients, State
from .groups import rank_in
from .step import Ring, Step
from .strategies.gather import by_rank, by_shard, keys_in_order, sum_parts
from .transfer import Transfer, all_gather, exchange


def forward(this: Any, q: Tensor, keys: Keys, score: Score, backend: Backend, total: State | None) -> State:
    """Do what ``loop.forward`` does, by groups of heads."""
    found = []
    for step in this.steps(gather_groups(keys, this.ring)):
        with this.named(step):
            q_heads, *state = map(step.cut, (q, *(total.arrays if total else ())))
            part = step.score(score, q_heads.shape[2])
            state = step.settle(backend.attend(q_heads, step.keys, step.rows, part, State(*state) if state else None, last=True))
        found.append(state.arrays)
    return State(*map(side_by_side, zip(*found, strict=True)))


def backward(
    this: Any, q: Tensor, keys: Keys, total: State, dtotal: State, score: Score, backend: Backend
) -> tuple[Tensor, Gradients, Tensor | None]:
    """Do what ``loop.backward`` does, by groups of heads."""
    taken, found, dsinks = [], [], []
    for step in this.steps(gather_groups(keys, this.ring)):
        with this.named(step):
            q_heads, dout, dlse, *state = map(step.cut, (q, *dtotal.arrays, *total.arrays))
            part = step.score(score, q_heads.shape[2])
            inputs = backend.backward_inputs(q_heads, step.keys, step.rows, part, State(*state), State(dout, dlse))
            gradients = backend.attend_backward(inputs, step.keys, step.rows, part, None, step.arrived, last=True)
            dq, dkv = step.settle(gradients)
            step.send_home(dkv)
        taken.append(step)
        found.append(dq)
        dsinks.append(inputs.sinks)
    dkv = side_by_side([step.home() for step in taken])
    return side_by_side(found), dkv, None if score.sinks is None else torch.cat(dsinks)


def side_by_side(parts: Iterable[Tensor]) -> Tensor:
    """Concatenate the groups' parts [b s heads ...] of an array along the heads."""
    return torch.cat([*parts], 2)


def gather_groups(keys: Keys, ring: Ring) -> Iterator[HeadStep]:
    """Yield the step of each group, after the transfer of the next group's keys has begun."""
    own, rest, step = keys.kv.chunk(ring.plan.groups, 2), (), None
    arriving = [all_gather((own[0], *keys[1:]), ring.group)]
    for number in range(len(own)):
        kv, *with_first = arriving.pop().wait()
        rest = rest or with_first
        step = HeadStep(keys_in_order(join(Keys(kv, *rest), keys.kv.shape[1]), ring), step, ring, number)
        del kv  # its memory serves the next group
        arriving.append(all_gather(own[number + 1 : number + 2], ring.group))
        yield step
        del step.keys  # the loops still hold the step


class HeadStep(Step):
    """The ``Step`` on the keys of all ranks, of group ``number``, after the step ``before``."""

    def __init__(self, keys: Keys, before: HeadStep | None, ring: Ring, number: int) -> None:
        self.keys, self.rows = keys, ring.plan.rows(rank_in(ring.group), 0)
        self.last, self.shift = True, 0
        self._before, self._ring, self._number = before, ring, number
        self._returning: Transfer | None = None
        self._home: Tensor | None = None

    def cut(self, x: Tensor) -> Tensor:
        """Return the group's heads of ``x`` [b s h ...]."""
        return align(x.chunk(self._ring.plan.groups, 2)[self._number])

    def score(self, score: Score, heads: int) -> Score:
        """Return ``score`` for the group's query heads, ``heads`` in each group."""
        return score.of_heads(self._number * heads, heads)

    def arrived(self) -> None:
        """Return None: each rank sends its gradients straight to the keys' owner."""

    def send_home(self, dkv: Gradients) -> None:
        """Add the gradients that arrived for the group before, and start to return ``dkv`` to the owners of the keys."""
        assert isinstance(dkv, Tensor), "what travels is packed"
        if self._before is not None:
            self._before.home()
            self._before = None
        parts = by_rank(by_shard(dkv, self._ring), self._ring.plan.ranks)
        self._returning = exchange((parts,), 0, self._ring.group)

    def home(self) -> Tensor:
        if self._returning is not None:
            self._home = sum_parts(*self._returning.wait()).clone()  # not a part of what arrived, whose memory would stay
            self._returning = None
        assert self._home is not None
        return self._home
