"""The strategy "ring": one ppermute per hop moves the keys, while the rank attends to its current keys.

In the forward k, v, the key mask and the key extents travel (``attend/keys.py``). In the backward they travel again, together
with the gradients of k and v. At the end these gradients arrive at the rank that owns the keys. All arrays of the queries (q,
out, lse, dout, dq) stay on their rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.runs import row

from ...attend.keys import Keys
from ...attend.state import Gradients
from ..step import Ring, Strategy, T
from ..transfer import send


class OneWay(Strategy):
    """The strategy "ring": queries stay on their rank, keys travel, and in the backward the keys' gradients travel too."""

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[RingStep]:
        """Yield a step for each shift of the plan, with the keys that started on ``rank - shift``."""
        hops = (*ring.plan.hops, 0)
        travelling = None
        for shift, hop in zip(ring.plan.shifts, hops, strict=True):
            step = RingStep(keys, travelling, ring, shift, hop)
            yield step
            keys, travelling = step.next_keys, step.travelling


class RingStep:
    """A ``Step`` on the keys that started on rank ``rank - shift``; the constructor sends them to rank ``rank + hop``."""

    def __init__(self, keys: Keys, travelling: Gradients | None, ring: Ring, shift: int, hop: int) -> None:
        self.keys, self.shift = keys, shift
        self.last = shift == ring.plan.shifts[-1]
        self.rows = rows(ring, shift)
        self.next_keys = send(keys, hop, ring.axis, ring.plan.ranks) if hop else keys
        self.travelling = travelling
        self._onward = hop or -shift % ring.plan.ranks
        self._axis, self._ranks = ring.axis, ring.plan.ranks

    def settle(self, state: T) -> T:
        """Return ``state``, tied to the next keys by an optimization barrier: XLA starts the next step only when both are ready.

        Without the barrier XLA moves all hops to the front: memory grows with the ranks, and no transfer overlaps with compute.
        """
        if not self.last:
            state, self.next_keys = lax.optimization_barrier((state, self.next_keys))
        return state

    def arrived(self) -> jax.Array | None:
        """Return the gradients of ``keys``, summed over the ranks visited so far. Return None at the first step."""
        assert not isinstance(self.travelling, tuple), "what travels is packed"
        return self.travelling

    def send_home(self, dkv: Gradients) -> None:
        """Send ``dkv`` to the rank that receives ``keys`` next, or in the last step to the rank that owns ``keys``."""
        self.travelling = send(dkv, self._onward, self._axis, self._ranks) if self._onward else dkv

    def home(self) -> Gradients:
        assert self.travelling is not None
        return self.travelling


def rows(ring: Ring, shift: int | jax.Array) -> jax.Array:
    """Return a ``Row`` for each pair of a query run and a key run of rank - ``shift``, int32 [q_runs, k_runs, fields]."""
    plan, rank = ring.plan, lax.axis_index(ring.axis)
    q_runs = _runs(plan.q_runs, rank)[:, :, None]
    k_runs = _runs(plan.k_runs, (rank - shift) % plan.ranks)[:, None, :]
    fields: Any = row(q_runs, k_runs, plan.band, plan.q_slot, plan.k_slot)
    return jnp.stack(jnp.broadcast_arrays(*fields), -1).astype(jnp.int32)


def _runs(table: Sequence[Sequence[tuple[int, int, int, int]]], rank: jax.Array) -> jax.Array:
    """Return the runs of the traced ``rank``, int32 [4, runs]: base (index in the shard), length, start (position), stride."""
    return jnp.asarray(table, dtype=jnp.int32)[rank].T
