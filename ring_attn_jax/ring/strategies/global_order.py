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
from jax import lax

from ring_attn_core.plan.joined import GlobalPlan

from ...attend.keys import Keys, along_tokens, clipped, joined, side_by_side
from ...attend.score import Score
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
        of_q, of_k = _tokens(ring)
        extents = None if score.extents is None else clipped(score.extents)
        spread, extents = jax.tree.map(lambda x: of_q.sort(side_by_side(all_gather(x, ring.axis))), (queries, extents))
        whole = joined(jax.tree.map(lambda x: all_gather(x, ring.axis), keys), keys.kv.shape[1])
        # The barrier keeps XLA from compiling the tiles in another way where it knows what surrounds them, such as on one rank.
        spread, keys, extents, own_queries, own_keys = lax.optimization_barrier(
            (spread, along_tokens(of_k.sort, whole), extents, of_q.own, of_k.own)
        )
        return spread, keys, replace(score, extents=extents, own_queries=own_queries, own_keys=own_keys)

    def collect(self, results: tuple[jax.Array, ...], ring: Ring) -> tuple[jax.Array, ...]:
        """Return the results of this rank's own queries. At padding out is 0 and lse -inf."""
        of_q, _ = _tokens(ring)
        results = lax.optimization_barrier(results)
        return tuple(of_q.select(x, blank) for x, blank in zip(results, (0.0, -math.inf, 0.0), strict=False))

    def collect_gradients(
        self, dq: jax.Array, dkv: Gradients, of_q: BackwardInputs, ring: Ring
    ) -> tuple[jax.Array, Gradients, jax.Array | None]:
        """Return the gradients of this rank's own queries and keys, and on rank 0 that of the sinks, elsewhere 0."""
        queries, keys = _tokens(ring)
        dq, dkv, dsinks = lax.optimization_barrier((dq, dkv, of_q.sinks))
        assert not isinstance(dkv, tuple), "what travels is packed"
        dsinks = None if dsinks is None else jnp.where(lax.axis_index(ring.axis) == 0, dsinks, 0)
        return queries.select(dq), keys.select(dkv), dsinks


class _Tokens(NamedTuple):
    """``order`` [n]: the index in the joined shards of the token at each position from 0 on. ``places``: the position of each
    token of this rank's shard, ``length`` and above at padding."""

    order: jax.Array
    places: jax.Array
    length: int

    @property
    def own(self) -> jax.Array:
        """Return bool [n]: True at the positions of this rank's tokens."""
        return jnp.zeros_like(self.places, bool, shape=self.order.shape).at[self.places].set(True, mode="drop")

    def sort(self, x: jax.Array) -> jax.Array:
        """Return the tokens of the joined shards ``x`` [b ranks*n ...] by position, without padding."""
        return jnp.take(x, self.order, axis=1, mode="clip", unique_indices=True)

    def select(self, x: jax.Array, blank: float = 0.0) -> jax.Array:
        """Return the own tokens of ``x`` [b n h ...] in the order of the shard; padding gets ``blank``."""
        where = (self.places < self.length).reshape(1, -1, *[1] * (x.ndim - 2))
        return jnp.where(where, jnp.take(x, self.places, axis=1, mode="clip"), blank)


def _tokens(ring: Ring) -> tuple[_Tokens, _Tokens]:
    """Return the indices of the queries and of the keys."""
    plan = ring.plan
    assert isinstance(plan, GlobalPlan)
    of = lambda places, length, slot: _Tokens(
        jnp.asarray(places.reshape(-1).argsort()[:slot], jnp.int32), jnp.asarray(places)[lax.axis_index(ring.axis)], length
    )
    return of(plan.q_places, plan.length, plan.q_slot), of(plan.k_places, plan.kv_length, plan.k_slot)
