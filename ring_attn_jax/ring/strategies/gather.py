"""The strategy "gather": one all-gather of each array fetches all keys, and one step computes on them.

The backward gathers the keys again. Each rank receives the gradients of its own keys from all ranks, in at least float32, and
adds them in rank order. Each rank holds the keys of all ranks in memory. In the backward it also holds a gradient for each of
these keys: the contribution of its own queries.
"""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_attn_core.plan.balanced_layout import BalancedLayout

from ...attend.keys import Keys, along_tokens, join
from ...attend.score import Score
from ...attend.state import BackwardInputs, Gradients
from ..step import Ring
from ..transfer import all_gather, exchange
from .ring import OneWay


class GatherKeys(OneWay):
    """The strategy "gather": each rank all-gathers the keys of all ranks and computes one step."""

    def spread(
        self, queries: tuple[jax.Array, ...], keys: Keys, score: Score, ring: Ring
    ) -> tuple[tuple[jax.Array, ...], Keys, Score]:
        """Return ``queries``, the keys of all ranks, and ``score``. In a balanced layout sort the keys by position."""
        parts = jax.tree.map(lambda x: all_gather(x, ring.axis), keys)
        return queries, keys_in_order(join(parts, keys.kv.shape[1]), ring), score

    def collect_gradients(
        self, dq: jax.Array, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[jax.Array, Gradients, jax.Array | None]:
        """Return ``dq`` (unchanged), the sum over all ranks of the gradients of this rank's own keys, and the sinks' gradient."""
        assert not isinstance(dkv, tuple), "what travels is packed"
        parts = exchange(by_rank(by_shard(dkv, ring), ring.plan.ranks), 0, 0, ring.axis, None)
        return dq, sum_parts(parts), query.sinks


def keys_in_order(keys: Keys, ring: Ring) -> Keys:
    """Sort ``keys``, the joined shards of several ranks, by position if the layout is balanced; else return them unchanged."""
    return along_tokens(lambda x: in_order(x, ring), keys) if isinstance(ring.plan.layout, BalancedLayout) else keys


def in_order(x: jax.Array, ring: Ring) -> jax.Array:
    """Sort the tokens of ``x``, joined shards [b shards*n ...], by position if the layout is balanced; else return ``x``."""
    return x if (orders := _orders(ring)) is None else _take(x, orders, ring)


def by_shard(x: jax.Array, ring: Ring) -> jax.Array:
    """Undo ``in_order``: put the tokens of ``x`` [b shards*n ...] back into the order of the joined shards."""
    return x if (orders := _orders(ring)) is None else _take(x, orders.argsort(1), ring)


def _orders(ring: Ring) -> np.ndarray | None:
    """Return for each group of joined shards the indices that sort them by position, [groups, tokens]; None if not balanced."""
    if not isinstance(ring.plan.layout, BalancedLayout):
        return None
    groups = ring.plan.layout.stretches(ring.plan.k_shards)
    return np.stack([np.concatenate([np.arange(first, first + length) for first, length in group]) for group in groups])


def _take(x: jax.Array, orders: np.ndarray, ring: Ring) -> jax.Array:
    own = jnp.asarray(orders, jnp.int32)[lax.axis_index(ring.axis) // ring.plan.k_shards]
    return jnp.take(x, own, axis=1, mode="clip", unique_indices=True)


def by_rank(x: jax.Array, ranks: int) -> jax.Array:
    """Split x [b ranks*n ...] by rank and return it as [ranks b n ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], ranks, x.shape[1] // ranks, *x.shape[2:]), 1, 0)


def sum_parts(parts: jax.Array) -> jax.Array:
    """Sum ``parts`` [n ...] over n in index order: the order of the additions determines the last bits of the sum."""
    return reduce(jnp.add, jnp.unstack(parts))
