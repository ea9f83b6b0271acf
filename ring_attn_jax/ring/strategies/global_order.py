"""The strategy of ``order="global"``: all-gathers fetch queries and keys of all ranks, and each rank puts them in global order.

The backward also gathers out, lse and their gradients, and computes the gradients of each rank's own queries and keys there, so
none of them travels. The sinks' gradient, a sum over all queries, is that of rank 0; the other ranks contribute 0.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_attn_core.plan.global_order import GlobalPlan, OwnRuns

from ...attend.keys import Keys, along_tokens, clip, join, side_by_side
from ...attend.score import OwnTiles, Score
from ...attend.state import BackwardInputs, Gradients
from ..step import Ring
from ..transfer import all_gather
from .ring import OneWay


class GlobalOrder(OneWay):
    """The strategy of ``order="global"``: each rank computes on all tokens in order of position."""

    def spread(
        self, queries: tuple[jax.Array, ...], keys: Keys, score: Score, ring: Ring
    ) -> tuple[tuple[jax.Array, ...], Keys, Score]:
        """Return the queries, keys and extents of all ranks by position, and a score that marks this rank's own tokens."""
        q_order, k_order = _tokens(ring)
        extents = None if score.extents is None else clip(score.extents)
        spread, extents = jax.tree.map(lambda x: q_order.sort(side_by_side(all_gather(x, ring.axis))), (queries, extents))
        whole = join(jax.tree.map(lambda x: all_gather(x, ring.axis), keys), keys.kv.shape[1])
        # The barrier keeps XLA from compiling the tiles in another way where it knows what surrounds them, such as on one rank.
        whole = whole if k_order.order is None else along_tokens(k_order.sort, whole)
        spread, keys, extents, own_queries, own_keys = lax.optimization_barrier(
            (spread, whole, extents, q_order.own, k_order.own)
        )
        score = replace(score, extents=extents, own_queries=own_queries, own_keys=own_keys)
        return spread, keys, replace(score, query_tiles=q_order.tiles, key_tiles=k_order.tiles)

    def collect(self, results: tuple[jax.Array, ...], ring: Ring) -> tuple[jax.Array, ...]:
        """Return the results of this rank's own queries. At padding out is 0 and lse -inf."""
        q_order, _ = _tokens(ring)
        results = lax.optimization_barrier(results)
        return tuple(q_order.select(x, blank) for x, blank in zip(results, (0.0, -math.inf, 0.0), strict=False))

    def collect_gradients(
        self, dq: jax.Array, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[jax.Array, Gradients, jax.Array | None]:
        """Return the gradients of this rank's own queries and keys, and on rank 0 that of the sinks, elsewhere 0."""
        queries, keys = _tokens(ring)
        dq, dkv, dsinks = lax.optimization_barrier((dq, dkv, query.sinks))
        assert not isinstance(dkv, tuple), "what travels is packed"
        dsinks = None if dsinks is None else jnp.where(lax.axis_index(ring.axis) == 0, dsinks, 0)
        return queries.select(dq), keys.select(dkv), dsinks


class _Tokens(NamedTuple):
    """``order`` [n]: the index in the joined shards of the token at each position from 0 on, None if it is the position.
    ``places``: the position of each token of this rank's shard, ``length`` and above at padding. ``tiles``: for kernels."""

    order: jax.Array | None
    places: jax.Array
    length: int
    slot: int
    tiles: OwnTiles | None

    @property
    def own(self) -> jax.Array:
        """Return bool [n]: True at the positions of this rank's tokens."""
        return jnp.zeros_like(self.places, bool, shape=(self.slot,)).at[self.places].set(True, mode="drop")

    def sort(self, x: jax.Array) -> jax.Array:
        """Return the tokens of the joined shards ``x`` [b ranks*n ...] by position, without padding."""
        return x if self.order is None else jnp.take(x, self.order, axis=1, mode="clip", unique_indices=True)

    def select(self, x: jax.Array, blank: float = 0.0) -> jax.Array:
        """Return the own tokens of ``x`` [b n h ...] in the order of the shard; padding gets ``blank``."""
        if self.order is None and self.places.size == self.length:
            return x
        where = (self.places < self.length).reshape(1, -1, *[1] * (x.ndim - 2))
        return jnp.where(where, jnp.take(x, self.places, axis=1, mode="clip"), blank)


def _tokens(ring: Ring) -> tuple[_Tokens, _Tokens]:
    plan, rank = ring.plan, lax.axis_index(ring.axis)
    assert isinstance(plan, GlobalPlan)

    def of(places: np.ndarray, length: int, slot: int, own: OwnRuns | None) -> _Tokens:
        sorts = places.reshape(-1).argsort()[:slot]
        order = None if np.array_equal(sorts, np.arange(places.size)) else jnp.asarray(sorts, jnp.int32)
        tiles = None if own is None else own_tiles(own, rank, slot)
        return _Tokens(order, jnp.asarray(places)[rank], length, slot, tiles)

    return (
        of(plan.q_places, plan.length, plan.q_slot, plan.own_queries),
        of(plan.k_places, plan.kv_length, plan.k_slot, plan.own_keys),
    )


def own_tiles(own: OwnRuns, rank: jax.Array, slot: int) -> OwnTiles:
    """Return the indices of this rank's tiles in arrays of ``slot`` tokens."""
    bases, lengths, starts, _ = jnp.asarray(own.runs, jnp.int32)[rank].T[..., None]
    at = jnp.arange(slot, dtype=jnp.int32)
    inside = (at >= starts) & (at < starts + lengths)
    places = jnp.max(jnp.where(inside, at - starts + bases, 0), 0)
    order = (starts + jnp.arange(own.slot, dtype=jnp.int32)).reshape(-1)
    return OwnTiles(jnp.asarray(own.rows, jnp.int32)[rank], order, places)
