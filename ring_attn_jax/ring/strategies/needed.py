"""The strategy "direct" in a balanced layout: one exchange brings a rank all keys that it needs from others, for one step.

The plan (``plan/needed.py`` of the core) determines the keys. They are in transfer while the rank attends to its own keys. Then
they are sorted by position, as kernels need them. Array sizes are static in JAX: each rank sends each other rank equally many
keys, and the shards of received keys are equally long on every rank; the rest is padding. In the backward the keys travel again,
and their gradients return to the owner, which adds the gradients from ranks ``rank + 1``, ``rank + 2``, ... in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_attn_core.kernels.call import BEYOND
from ring_attn_core.plan.needed import NeededPlan

from ...attend.keys import Keys, along_tokens, clipped
from ...attend.one_run import limits, positions_of
from ...attend.state import Gradients, State
from ..step import Ring, Step, T
from ..transfer import exchange
from .ring import rows, rows_between


def circulate_needed(keys: Keys, plan: NeededPlan, ring: Ring) -> Iterator[Step]:
    """Yield a step on this rank's own keys, and if any rank receives keys, a step on all keys that this rank receives."""
    if not plan.hops:
        yield NeededStep(keys, ring, None, rows(ring, 0))
        return
    places = _places(plan, ring.axis)
    own = NeededStep(keys, ring, places, rows(ring, 0))
    own.arriving = _exchanged(keys, places.sent, ring)
    yield own
    arrived = along_tokens(lambda x: _taken(x, places.order), own.arriving)
    yield NeededStep(arrived, ring, places, _arrived_rows(plan, ring), own)


class Places(NamedTuple):
    """The indices, int32, by which keys are sent and sorted, and their gradients returned.

    Each rank sends ``plan.most_tokens`` keys to each rank. Received keys have two orders. On arrival they are sorted by sending
    rank. In the padded shard, on which the step computes, they are sorted by position.

    ``sent``: indices in this rank's shard of the keys to send, by receiving rank. ``order``: for each key of the padded shard,
    its index on arrival. ``back``: for each key on arrival, its index in the padded shard. Padding has an index beyond the array.
    """

    sent: jax.Array
    order: jax.Array
    back: jax.Array


def _places(plan: NeededPlan, axis: str) -> Places:
    rank = lax.axis_index(axis)
    sent, order, back = (jnp.asarray(table)[rank] for table in _tables(plan))
    each, count = plan.most_tokens, plan.most_capacity
    return Places(_indices(sent, each).reshape(-1), _indices(order, count), _indices(back, each).reshape(-1))


def _indices(stretches: jax.Array, count: int) -> jax.Array:
    """Expand ``stretches`` [... n 2] to an array of ``count`` indices.

    A stretch (base, first) fills the array from ``base`` to the next stretch's base with first, first + 1, ...
    """
    base, first = jnp.unstack(stretches, axis=-1)
    place = jnp.arange(count, dtype=jnp.int32)
    last = (base[..., None, :] <= place[:, None]).sum(-1, dtype=jnp.int32) - 1
    return place + jnp.take_along_axis(first - base, last, -1)


@lru_cache(maxsize=8)  # an entry per batch of documents, some 50 KB for 8 ranks
def _tables(plan: NeededPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each rank's ``sent``, ``order`` and ``back`` of ``Places`` as stretches (base, first), which ``_indices`` expands.

    Shapes: int32 [ranks ranks n 2], [ranks n 2], [ranks ranks n 2].
    """
    ranks, each = range(plan.ranks), plan.most_tokens
    sent, back = ([[[] for _ in ranks] for _ in ranks] for _ in range(2))
    order: list[list[tuple[int, int]]] = [[] for _ in ranks]
    for reader in ranks:
        count, of_owner = 0, [0] * plan.ranks
        for part in plan.received(reader):
            base = of_owner[part.owner]
            sent[part.owner][reader].append((base, part.first))
            order[reader].append((count, part.owner * each + base))
            back[reader][part.owner].append((base, count))
            count, of_owner[part.owner] = count + part.length, base + part.length
        order[reader].append((count, plan.ranks * each))
        for owner in ranks:
            sent[owner][reader].append((of_owner[owner], plan.kv_local))
            back[reader][owner].append((of_owner[owner], plan.most_capacity))
    of_ranks = lambda lists: even([x for of_rank in lists for x in of_rank], (BEYOND, 0)).reshape(plan.ranks, plan.ranks, -1, 2)
    return of_ranks(sent), even(order, (BEYOND, 0)), of_ranks(back)


def even(lists: Sequence[Sequence[tuple[int, ...]]], padding: tuple[int, ...]) -> np.ndarray:
    """Return lists of tuples as one array, int32 [lists n fields], with ``padding`` after the tuples of shorter lists."""
    longest = max(map(len, lists))
    return np.array([[*each, *[padding] * (longest - len(each))] for each in lists], np.int32)


def _taken(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return the tokens ``index`` of ``x`` [b n ...], and 0 for an index of n or more."""
    return jnp.take(x, index, axis=1, mode="fill", fill_value=0)


def _exchanged(keys: Keys, sent: jax.Array, ring: Ring) -> Keys:
    """Send the keys with the indices ``sent``. Return the arriving keys, in order of the sending ranks."""
    return along_tokens(lambda x: exchange(_taken(x, sent), 1, 1, ring.axis, None), keys)


def _arrived_rows(plan: NeededPlan, ring: Ring) -> jax.Array:
    """Return the rows of the step on the received keys. Empty runs of keys are added, so each rank has equally many rows."""
    runs: Any = even([plan.arrived_runs(rank) or ((0, 0, 0, 1),) for rank in range(plan.ranks)], (0, 0, 0, 1))
    rank = lax.axis_index(ring.axis)
    return rows_between(plan, rank, runs, rank, plan.most_capacity)


class NeededStep:
    """A ``Step`` on this rank's own keys (``shift`` 0), or on all keys that it receives (``shift`` 1).

    ``own``: the step on this rank's own keys, if it precedes this step. ``places``: None if no keys travel. ``arriving``: the
    keys in transfer.
    """

    def __init__(self, keys: Keys, ring: Ring, places: Places | None, rows: jax.Array, own: NeededStep | None = None) -> None:
        self.keys, self.rows, self.shift = keys, rows, int(own is not None)
        self.last = self.shift == ring.plan.shifts[-1]
        self.arriving = keys
        self._ring, self._places, self._own = ring, places, own
        self._dkv: jax.Array | None = None

    def settle(self, state: T) -> T:
        """Return ``state``, tied to the arriving keys by an optimization barrier, as in the strategy "ring"."""
        if not self.last:
            state, self.arriving = lax.optimization_barrier((state, self.arriving))
        return state

    def arrived(self) -> None:
        """Return None: no gradients arrive here, because the keys' owner adds the gradients of all ranks."""

    def send_home(self, dkv: Gradients) -> None:
        """Store the gradients. ``home`` sends them."""
        assert not isinstance(dkv, tuple), "what travels is packed"
        self._dkv = dkv

    def home(self) -> jax.Array:
        """Return the gradients of this rank's own keys: its own contribution plus those of rank + 1, rank + 2, ..., in order."""
        assert self._dkv is not None
        if self._own is None or self._places is None:
            return self._dkv
        assert self._own._dkv is not None
        return _with_returned(self._own._dkv, self._dkv, self._places, self._ring)


def _with_returned(total: jax.Array, dkv: jax.Array, places: Places, ring: Ring) -> jax.Array:
    """Send the gradients ``dkv`` of the received keys to their owners. Return ``total`` plus the gradients that arrive."""
    plan, rank = ring.plan, lax.axis_index(ring.axis)
    assert isinstance(plan, NeededPlan)
    returned, each = exchange(_taken(dkv, places.back), 1, 1, ring.axis, None), plan.most_tokens
    for shift in range(1, plan.ranks):
        if any(plan.tokens(owner, (owner + shift) % plan.ranks) for owner in range(plan.ranks)):
            first = (rank + shift) % plan.ranks * each
            part, index = (lax.dynamic_slice_in_dim(x, first, each, dim) for x, dim in ((returned, 1), (places.sent, 0)))
            total = total.at[:, index].add(part, mode="drop", unique_indices=True)
    return total


def unavailable(extents: jax.Array, ring: Ring) -> jax.Array | None:
    """Return bool [b s]: True at queries that may see keys which this rank neither holds nor receives.

    Return None if the strategy sends all keys. Traced extents cannot raise, so ``marked`` sets the out of these queries to NaN.
    """
    plan = ring.plan
    if not isinstance(plan, NeededPlan):
        return None
    of_ranks = even([[(0, 0), *plan.available(rank)] for rank in range(plan.ranks)], (BEYOND, 0))
    starts, ends = jnp.unstack(jnp.asarray(of_ranks)[lax.axis_index(ring.axis)], axis=-1)
    at = positions_of(rows(ring, 0)[:, 0, 2:5], extents.shape[1])
    first, end = jnp.unstack(jnp.clip(clipped(extents), *limits(at, plan.band)), axis=-1)
    end = jnp.minimum(end, plan.kv_length)
    available = ends[jnp.searchsorted(starts, first, side="right", method="scan_unrolled") - 1]
    return (first < end) & (at < BEYOND) & (end > available)


def marked(state: State, extents: jax.Array | None, ring: Ring) -> State:
    """Set ``out`` to NaN at ``unavailable`` queries, because their keys did not travel."""
    outside = None if extents is None else unavailable(extents, ring)
    return state if outside is None else state._replace(out=jnp.where(outside[..., None, None], jnp.nan, state.out))
