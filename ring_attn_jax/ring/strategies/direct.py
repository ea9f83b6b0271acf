"""The strategy "direct": each rank sends every other rank only the keys visible to it, and gets their gradients back.

The plan (``plan/direct.py`` of the core) determines the slices. Array sizes are static in JAX, so each slice is extended, with
keys beside it, to the length of the longest that any rank sends. A step places the received slices in a shard of zeros. No query
sees the zeros, so a step has the same ``rows`` and backends as in the strategy "ring". During a step, the slices of the next step
are in transfer. In the backward, the gradients of the previous step are in transfer to the owner of the keys, which adds them in
the order of the shifts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.plan.direct import DirectPlan, Slice

from ...attend.keys import Keys, cut, placed
from ...attend.state import Gradients
from ..step import Ring, Step, T
from ..transfer import send_from
from .ring import OneWay, rows


class Direct(OneWay):
    """The strategy "direct"."""

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield a step for each shift of the plan, with the visible keys of ``rank - shift``."""
        if not ring.plan.hops:
            yield from super().circulate(keys, ring)
            return
        step = DirectStep(keys, keys, None, ring, 0)
        for shift in ring.plan.shifts[1:]:
            step.next_keys = fetched(step.own, ring, shift)
            yield step
            step = DirectStep(step.next_keys, step.own, step, ring, shift)
        yield step


class DirectStep:
    """A ``Step`` on the visible keys of rank ``rank - shift``, after the step ``before``. ``own``: this rank's own keys."""

    def __init__(self, keys: Keys, own: Keys, before: DirectStep | None, ring: Ring, shift: int) -> None:
        self.keys, self.rows, self.last = keys, rows(ring, shift), shift == ring.plan.shifts[-1]
        self.own, self.next_keys = own, keys
        self.total: jax.Array | None = None
        self._before, self._ring, self.shift = before, ring, shift

    def settle(self, state: T) -> T:
        """Return ``state``, tied by an optimization barrier to the next keys and the gradients that came home before.

        Without the barrier XLA moves all transfers to the front, as in the ring; this rank's own keys pass it too, because XLA
        would still move those that depend on nothing but them.
        """
        if not self.last:
            total = None if self._before is None else self._before.total
            tied = lax.optimization_barrier((state, self.next_keys, self.own, total))
            state, self.next_keys, self.own, total = tied
            if self._before is not None:
                self._before.total = total
        return state

    def arrived(self) -> None:
        """Return None: the owner adds the gradients of all ranks."""

    def send_home(self, dkv: Gradients) -> None:
        """Send the slices' gradients to their owner, and add the arriving ones to the total of this rank's own keys."""
        assert not isinstance(dkv, tuple), "what travels is packed"
        if self._before is None:
            self.total = dkv
            return
        self.total = self._before.total
        assert self.total is not None
        for each in slices(self._ring, self.shift):
            part = lax.dynamic_slice_in_dim(dkv, each.theirs, each.tokens, 1)
            readers = [(owner + self.shift) % self._ring.plan.ranks for owner in each.owners]
            part = send_from(part, readers, -self.shift, self._ring.axis, self._ring.plan.ranks)
            before = lax.dynamic_slice_in_dim(self.total, each.mine, each.tokens, 1)
            self.total = lax.dynamic_update_slice_in_dim(self.total, before + part, each.mine, 1)

    def home(self) -> Gradients:
        """Return the gradients of this rank's own keys, summed in the order of the shifts."""
        assert self.total is not None
        return self.total


class Sent(NamedTuple):
    """One slice of a shift: ranks ``owners`` send ``tokens`` keys. ``mine``, ``theirs``: first index sent and received."""

    mine: jax.Array
    theirs: jax.Array
    tokens: int
    owners: list[int]


def slices(ring: Ring, shift: int) -> list[Sent]:
    """Return the slices that this rank sends and receives at a shift; their offsets are traced, because the rank is."""
    plan, rank = ring.plan, lax.axis_index(ring.axis)
    assert isinstance(plan, DirectPlan)

    def of(each: Slice) -> Sent:
        firsts = jnp.asarray(each.even_firsts, jnp.int32)
        owners = [owner for owner, tokens in enumerate(each.lengths) if tokens]
        return Sent(firsts[rank], firsts[(rank - shift) % plan.ranks], each.longest, owners)

    return [of(each) for each in plan.slices(shift)]


def fetched(own: Keys, ring: Ring, shift: int) -> Keys:
    """Send slices of ``own`` to another rank; return the slices received from rank (rank - shift), placed in a shard of zeros."""
    parts = []
    for each in slices(ring, shift):
        sent = own if each.tokens == own.kv.shape[1] else cut(own, each.mine, each.tokens)
        parts.append((each.theirs, send_from(sent, each.owners, shift, ring.axis, ring.plan.ranks)))
    return placed(parts, own)
