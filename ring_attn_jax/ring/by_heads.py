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

import jax
import jax.numpy as jnp
from jax import lax

from ..attend.backend import Backend
from ..attend.keys import Keys, join
from ..attend.score import Score
from ..attend.state import Gradients, State
from .step import Ring, Step, T
from .strategies.gather import by_rank, by_shard, keys_in_order, sum_parts
from .strategies.ring import rows
from .transfer import all_gather, exchange


def forward(this: Any, q: jax.Array, keys: Keys, score: Score, backend: Backend, total: State | None) -> State:
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
    this: Any, q: jax.Array, keys: Keys, total: State, dtotal: State, score: Score, backend: Backend
) -> tuple[jax.Array, Gradients, jax.Array | None]:
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
    return side_by_side(found), dkv, None if score.sinks is None else jnp.concatenate(dsinks)


def side_by_side(parts: Iterable[jax.Array]) -> jax.Array:
    """Concatenate the groups' parts [b s heads ...] of an array along the heads."""
    return jnp.concatenate([*parts], 2)


def gather_groups(keys: Keys, ring: Ring) -> Iterator[HeadStep]:
    """Yield the step of each group, after the keys of the next group have been gathered."""
    own = jnp.split(keys.kv, ring.plan.groups, 2)
    kv, *rest = jax.tree.map(lambda x: all_gather(x, ring.axis), keys._replace(kv=own[0]))
    step, every_rank = None, rows(ring, 0)
    for number in range(len(own)):
        whole = keys_in_order(join(Keys(kv, *rest), keys.kv.shape[1]), ring)
        step = HeadStep(whole, every_rank, step, ring, number, own)
        if number + 1 < len(own):
            kv = all_gather(own[number + 1], ring.axis)
        yield step


class HeadStep(Step):
    """The ``Step`` on the keys of all ranks, of group ``number``, after the step ``before``. ``own``: the groups of own keys."""

    def __init__(
        self, keys: Keys, rows: jax.Array, before: HeadStep | None, ring: Ring, number: int, own: list[jax.Array]
    ) -> None:
        self.keys, self.rows, self.last, self.shift = keys, rows, True, 0
        self._before, self._ring, self._number, self._own = before, ring, number, own
        self.travelling: jax.Array | None = None

    def cut(self, x: jax.Array) -> jax.Array:
        """Return the group's heads of ``x`` [b s h ...]."""
        return jnp.split(x, self._ring.plan.groups, 2)[self._number]

    def score(self, score: Score, heads: int) -> Score:
        """Return ``score`` for the group's query heads, ``heads`` in each group."""
        return score.of_heads(self._number * heads, heads)

    def settle(self, state: T) -> T:
        """Return ``state``, and make it and the gradients of group n - 1 a precondition of gathering the keys of group n + 2.

        XLA gathers those keys only when both are computed. So it holds the keys of two groups, and does not move all transfers to
        the front; no transfer waits for the step beside which it runs.
        """
        if (later := self._number + 2) < len(self._own):
            before = self._before or self
            state, before.travelling, self._own[later] = lax.optimization_barrier((state, before.travelling, self._own[later]))
        return state

    def arrived(self) -> None:
        """Return None: each rank sends its gradients straight to the keys' owner."""

    def send_home(self, dkv: Gradients) -> None:
        """Return ``dkv`` to the owners of the keys, which add it up."""
        assert not isinstance(dkv, tuple), "what travels is packed"
        parts = by_rank(by_shard(dkv, self._ring), self._ring.plan.ranks)
        self.travelling = sum_parts(exchange(parts, 0, 0, self._ring.axis, None))

    def home(self) -> jax.Array:
        """Return the sum over all ranks of the gradients of this rank's own keys."""
        assert self.travelling is not None
        return self.travelling
