"""The strategy "direct": each rank receives from each other rank only the keys that it sees, and returns their gradients.

The plan (``plan/direct.py`` of the core) determines the slices of keys that each rank sends. Array sizes are static in JAX. So
each slice is extended by neighboring keys to the length of the longest slice that any rank sends. A step places the received
slices in a shard of zeros. ``Step.rows`` state what each run of queries sees of each run of keys. They are the same as in the
strategy "ring", because no query sees the zeros, so any backend can compute the step. During a step the next step's slices are in
transfer. In the backward the previous step's gradients are also in transfer, to the keys' owner. The owner adds the gradients in
the order of the shifts. For a balanced layout see ``needed.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.plan.direct import DirectPlan, Slice
from ring_attn_core.plan.needed import NeededPlan

from ...attend.keys import Keys, cut, placed
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
        """Return the arguments unchanged. In a balanced layout (``NeededPlan``) add the keys that this rank receives."""
        return queries, with_received(keys, ring.plan, ring.axis) if isinstance(ring.plan, NeededPlan) else keys, score

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield a step on this rank's own keys, then one per further shift, on the keys of ``rank - shift`` that this rank sees.

        In a balanced layout there is one step.
        """
        if not ring.plan.hops:
            yield from super().circulate(keys, ring)
            return
        step = DirectStep(keys, keys, None, ring, 0)
        for shift in ring.plan.shifts[1:]:
            step.next_keys = fetched(step.own, ring, shift)
            yield step
            step = DirectStep(step.next_keys, step.own, step, ring, shift)
        yield step

    def collect_gradients(
        self, dq: jax.Array, dkv: Gradients, of_q: BackwardInputs, ring: Ring
    ) -> tuple[jax.Array, Gradients, jax.Array | None]:
        """Return the gradients unchanged, but in a balanced layout first send the gradients of received keys to their owners."""
        if isinstance(ring.plan, NeededPlan):
            assert not isinstance(dkv, tuple), "what travels is packed"
            dkv = gradients_home(dkv, ring.plan, ring.axis)
        return dq, dkv, of_q.sinks


class DirectStep:
    """A ``Step`` on the visible keys of rank ``rank - shift``. ``before``: the previous step; ``own``: this rank's own keys."""

    def __init__(self, keys: Keys, own: Keys, before: DirectStep | None, ring: Ring, shift: int) -> None:
        self.keys, self.rows, self.last = keys, rows(ring, shift), shift == ring.plan.shifts[-1]
        self.own, self.next_keys = own, keys
        self.total: jax.Array | None = None
        self._before, self._ring, self.shift = before, ring, shift

    def settle(self, state: T) -> T:
        """Return ``state``, tied by an optimization barrier to the next keys and the gradients that this rank has received.

        Without the barrier XLA moves all transfers to the front of the program, as in the strategy "ring". The barrier also
        includes this rank's own keys. Otherwise XLA would still move the transfers that depend only on these keys.
        """
        if not self.last:
            total = None if self._before is None else self._before.total
            tied = lax.optimization_barrier((state, self.next_keys, self.own, total))
            state, self.next_keys, self.own, total = tied
            if self._before is not None:
                self._before.total = total
        return state

    def arrived(self) -> None:
        """Return None: no gradients arrive here, because the keys' owner adds the gradients of all ranks."""

    def send_home(self, dkv: Gradients) -> None:
        """Send the slices' gradients to the keys' owner, and add the arriving gradients to the sum for this rank's own keys."""
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
    """A slice of one shift: the ranks ``owners`` each send ``tokens`` keys.

    ``mine``: the first key that this rank sends, as an index in its shard. ``theirs``: the first key that this rank receives, as
    an index in the sender's shard.
    """

    mine: jax.Array
    theirs: jax.Array
    tokens: int
    owners: list[int]


def slices(ring: Ring, shift: int) -> list[Sent]:
    """Return the slices that this rank sends and receives at a shift. Their offsets are traced, because the rank is traced."""
    plan, rank = ring.plan, lax.axis_index(ring.axis)
    assert isinstance(plan, DirectPlan)

    def of(each: Slice) -> Sent:
        firsts = jnp.asarray(each.even_firsts, jnp.int32)
        owners = [owner for owner, tokens in enumerate(each.lengths) if tokens]
        return Sent(firsts[rank], firsts[(rank - shift) % plan.ranks], each.longest, owners)

    return [of(each) for each in plan.slices(shift)]


def fetched(own: Keys, ring: Ring, shift: int) -> Keys:
    """Send slices of ``own``. Return the slices received from rank (rank - shift), placed in a shard of zeros."""
    parts = []
    for each in slices(ring, shift):
        sent = own if each.tokens == own.kv.shape[1] else cut(own, each.mine, each.tokens)
        parts.append((each.theirs, send_from(sent, each.owners, shift, ring.axis, ring.plan.ranks)))
    return placed(parts, own)
