"""The strategy "direct" in a balanced layout: each rank receives all keys that it needs in one exchange, then computes one step.

The plan (``plan/needed.py`` of the core) determines which keys a rank needs. A rank's own and the received keys form the shard of
the step. They are sorted by position, as kernels need them. Array sizes are static in JAX, so padding makes the number of sent
keys equal for all pairs of ranks, and the step's shard equally long on all ranks. In the backward the keys travel again, and
their gradients return to the keys' owner, which adds those from ranks ``rank + 1``, ``rank + 2``, ... in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_attn_core.kernels.call import BEYOND
from ring_attn_core.plan.needed import NeededPlan

from ...attend.keys import Keys, along_tokens, clip
from ...attend.one_run import limits, positions_of
from ..step import Ring
from ..transfer import exchange
from .ring import rows


class Places(NamedTuple):
    """Indices, int32, to select keys to send, to sort keys into the step's shard, and to return their gradients.

    ``sent``: keys to send, in this rank's shard, by receiving rank. ``order``: for each key of the step's shard, its index in
    (own shard, received keys by sender). ``own``, ``received``: their indices in the step's shard. Padding is past the end.
    """

    sent: jax.Array
    order: jax.Array
    own: jax.Array
    received: jax.Array


def _places(plan: NeededPlan, axis: str) -> Places:
    rank = lax.axis_index(axis)
    sent, order, own, received = (jnp.asarray(table)[rank] for table in _tables(plan))
    each = plan.most_tokens
    return Places(
        _indices(sent, each).reshape(-1),
        _indices(order, plan.most_capacity),
        _indices(own, plan.kv_local),
        _indices(received, each).reshape(-1),
    )


def _indices(stretches: jax.Array, count: int) -> jax.Array:
    """Expand ``stretches`` [... n 2] of (base, first) to indices [... count]: first, first + 1, ... from ``base`` on."""
    base, first = jnp.unstack(stretches, axis=-1)
    place = jnp.arange(count, dtype=jnp.int32)
    last = (base[..., None, :] <= place[:, None]).sum(-1, dtype=jnp.int32) - 1
    return place + jnp.take_along_axis(first - base, last, -1)


@lru_cache(maxsize=8)  # an entry per batch of documents, some 50 KB for 8 ranks
def _tables(plan: NeededPlan) -> tuple[np.ndarray, ...]:
    """Return ``sent``, ``order``, ``own`` and ``received`` of ``Places`` for all ranks, as stretches (base, first), int32.

    Shapes: ``sent`` and ``received`` [ranks, other ranks, n, 2]; ``order`` and ``own`` [ranks, n, 2].
    """
    ranks, each, none = range(plan.ranks), plan.most_tokens, plan.most_capacity
    sent, received = ([[[] for _ in ranks] for _ in ranks] for _ in range(2))
    order: list[list[tuple[int, int]]] = [[] for _ in ranks]
    for reader in ranks:
        count, starts = 0, [0] * plan.ranks
        for base, part in plan.places(reader):
            count = base + part.length
            if part.owner == reader:
                order[reader].append((base, part.first))
                continue
            arrives = starts[part.owner]
            order[reader].append((base, plan.kv_local + part.owner * each + arrives))
            sent[part.owner][reader].append((arrives, part.first))
            received[reader][part.owner].append((arrives, base))
            starts[part.owner] = arrives + part.length
        order[reader].append((count, plan.kv_local + plan.ranks * each))
        for owner in ranks:
            sent[owner][reader].append((starts[owner], plan.kv_local))
            received[reader][owner].append((starts[owner], none))
    by_rank = lambda lists: even([x for spans in lists for x in spans], (BEYOND, 0)).reshape(plan.ranks, plan.ranks, -1, 2)
    own = even([_own(plan, rank) for rank in ranks], (BEYOND, 0))
    return by_rank(sent), even(order, (BEYOND, 0)), own, by_rank(received)


def _own(plan: NeededPlan, rank: int) -> list[tuple[int, int]]:
    """Return ``Places.own`` of a rank as stretches (index in its shard, index in the step's shard); padding maps past the end."""
    own: list[tuple[int, int]] = []
    end = 0
    for first, base, length in sorted((part.first, base, part.length) for base, part in plan.places(rank) if part.owner == rank):
        if first > end:
            own.append((end, plan.most_capacity))  # padding between runs
        own.append((first, base))
        end = first + length
    return [*own, (end, plan.most_capacity)]


def even(lists: Sequence[Sequence[tuple[int, ...]]], padding: tuple[int, ...]) -> np.ndarray:
    """Return lists of tuples as one array, int32 [lists n fields]. Fill shorter lists up to n with the tuple ``padding``."""
    longest = max(map(len, lists))
    return np.array([[*each, *[padding] * (longest - len(each))] for each in lists], np.int32)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return the tokens of ``x`` [b n ...] at the indices ``index``; an index of n or more, for padding, gives zeros."""
    return jnp.take(x, index, axis=1, mode="fill", fill_value=0)


def with_received(own: Keys, plan: NeededPlan, axis: str) -> Keys:
    """Exchange keys with all ranks. Return this rank's ``own`` and the received keys in one padded shard, sorted by position."""
    if not plan.exchanges:
        return own
    places = _places(plan, axis)

    def joined(x: jax.Array) -> jax.Array:
        received = exchange(_take(x, places.sent), 1, 1, axis, None)
        return _take(jnp.concatenate([x, received], 1), places.order)

    return along_tokens(joined, own)


def gradients_home(dkv: jax.Array, plan: NeededPlan, axis: str) -> jax.Array:
    """Send gradients of received keys home. Return those of this rank's own keys, summed from rank, rank + 1, ... in order."""
    if not plan.exchanges:
        return dkv
    rank, places, each = lax.axis_index(axis), _places(plan, axis), plan.most_tokens
    total, returned = _take(dkv, places.own), exchange(_take(dkv, places.received), 1, 1, axis, None)
    for shift in range(1, plan.ranks):
        if any(plan.tokens(owner, (owner + shift) % plan.ranks) for owner in range(plan.ranks)):
            first = (rank + shift) % plan.ranks * each
            part, index = (lax.dynamic_slice_in_dim(x, first, each, dim) for x, dim in ((returned, 1), (places.sent, 0)))
            total = total.at[:, index].add(part, mode="drop", unique_indices=True)
    return total


def unavailable(extents: jax.Array, ring: Ring) -> jax.Array | None:
    """Return bool [b s]: True for each query that may see a key that this rank lacks; None without a ``NeededPlan``."""
    plan = ring.plan
    if not isinstance(plan, NeededPlan):
        return None
    known_spans = even([[(0, 0), *plan.available(rank)] for rank in range(plan.ranks)], (BEYOND, 0))
    starts, ends = jnp.unstack(jnp.asarray(known_spans)[lax.axis_index(ring.axis)], axis=-1)
    at = positions_of(rows(ring, 0)[:, 0, 2:5], extents.shape[1])
    first, end = jnp.unstack(jnp.clip(clip(extents), *limits(at, plan.band)), axis=-1)
    end = jnp.minimum(end, plan.kv_length)
    available = ends[jnp.searchsorted(starts, first, side="right", method="scan_unrolled") - 1]
    return (first < end) & (at < BEYOND) & (end > available)
