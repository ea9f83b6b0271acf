"""The strategy "direct": each rank receives from other ranks only the keys that its queries see, and returns their gradients.

The plan (``plan/direct.py`` of the core) determines the slices of keys that each rank sends at shift s, to rank + s. Array sizes
are static in JAX, so each slice is extended by neighboring keys to the length of the longest slice that any rank sends. The
receiving rank places the slices in a shard of zeros. Its queries see no zeros, so ``Step.rows``, which describe the visible part
of the shard, are the same as in the strategy "ring", and any backend can compute the step. During a step the slices of the next
step are in transfer. In the backward the gradients of the previous step are also in transfer, to the keys' owner. The owner adds
the gradients in the order of the shifts. For a balanced layout see ``needed.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.plan.direct import DirectPlan, Slice
from ring_attn_core.plan.needed import NeededPlan

from ...attend.keys import Keys, cut, place
from ...attend.score import Score
from ...attend.state import BackwardInputs, Gradients
from ..step import Ring, Step, T
from ..transfer import send_from
from .needed import gradients_home, with_received
from .ring import OneWay, rows


class Direct(OneWay):
    """The strategy "direct": each rank sends its keys straight to the ranks that see them."""

    def spread(
        self, queries: tuple[jax.Array, ...], keys: Keys, score: Score, ring: Ring
    ) -> tuple[tuple[jax.Array, ...], Keys, Score]:
        """Return the arguments. In a balanced layout (``NeededPlan``) first receive keys and merge them into ``keys``."""
        return queries, with_received(keys, ring.plan, ring.axis) if isinstance(ring.plan, NeededPlan) else keys, score

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield a step for each shift on the visible keys of ``rank - shift``; in a balanced layout one, on merged keys."""
        if not ring.plan.hops:
            yield from super().circulate(keys, ring)
            return
        step = DirectStep(keys, keys, None, ring, 0)
        for shift in ring.plan.shifts[1:]:
            step.next_keys = fetch(step.own, ring, shift)
            yield step
            step = DirectStep(step.next_keys, step.own, step, ring, shift)
        yield step

    def collect_gradients(
        self, dq: jax.Array, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[jax.Array, Gradients, jax.Array | None]:
        """Return the gradients of this rank's q, keys and sinks; in a balanced layout, first send those of received keys home."""
        if isinstance(ring.plan, NeededPlan):
            assert not isinstance(dkv, tuple), "what travels is packed"
            dkv = gradients_home(dkv, ring.plan, ring.axis)
        return dq, dkv, query.sinks


class DirectStep:
    """A ``Step`` on the visible keys of rank ``rank - shift``. ``own``: this rank's own keys. ``before``: the previous step."""

    def __init__(self, keys: Keys, own: Keys, before: DirectStep | None, ring: Ring, shift: int) -> None:
        self.keys, self.rows, self.last = keys, rows(ring, shift), shift == ring.plan.shifts[-1]
        self.own, self.next_keys = own, keys
        self.total: jax.Array | None = None
        self._before, self._ring, self.shift = before, ring, shift

    def settle(self, state: T) -> T:
        """Return ``state``, tied by an optimization barrier to the next step's keys and the gradients that have arrived.

        Without the barrier, which includes this rank's own keys, XLA would move all transfers to the front of the program.
        """
        if not self.last:
            total = None if self._before is None else self._before.total
            tied = lax.optimization_barrier((state, self.next_keys, self.own, total))
            state, self.next_keys, self.own, total = tied
            if self._before is not None:
                self._before.total = total
        return state

    def arrived(self) -> None:
        """Return None: no sum travels with the keys, because each rank sends its gradients straight to the keys' owner."""

    def send_home(self, dkv: Gradients) -> None:
        """Send the gradients of received slices to the keys' owner; add those that arrive for this rank's keys to the sum."""
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
    """A slice of ``tokens`` keys that each of the ranks ``owners`` sends at one shift.

    ``mine``: the first key that this rank sends, in its shard. ``theirs``: the first key that it receives, in the sender's shard.
    """

    mine: jax.Array
    theirs: jax.Array
    tokens: int
    owners: list[int]


def slices(ring: Ring, shift: int) -> list[Sent]:
    """Return the slices that this rank sends and receives at a shift. Their indices are traced, as the rank is a traced value."""
    plan, rank = ring.plan, lax.axis_index(ring.axis)
    assert isinstance(plan, DirectPlan)

    def of(each: Slice) -> Sent:
        firsts = jnp.asarray(each.even_firsts, jnp.int32)
        owners = [owner for owner, tokens in enumerate(each.lengths) if tokens]
        return Sent(firsts[rank], firsts[(rank - shift) % plan.ranks], each.longest, owners)

    return [of(each) for each in plan.slices(shift)]


def fetch(own: Keys, ring: Ring, shift: int) -> Keys:
    """Send slices of ``own`` to rank + ``shift``. Return those received from rank - ``shift``, placed in a shard of zeros."""
    parts = []
    for each in slices(ring, shift):
        sent = own if each.tokens == own.kv.shape[1] else cut(own, each.mine, each.tokens)
        parts.append((each.theirs, send_from(sent, each.owners, shift, ring.axis, ring.plan.ranks)))
    return place(parts, own)
