"""The strategy "gather": one all-gather fetches all keys, and one step computes on them.

The backward gathers the keys again. Each rank receives the float32 gradients of its own keys from all ranks, and adds them in
rank order. In memory each rank holds the keys of all ranks; in the backward it also holds the gradients of all keys from its own
queries.
"""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp

from ...attend.keys import Keys, joined
from ...attend.score import Score
from ...attend.state import BackwardInputs, Gradients
from ..step import Ring
from ..transfer import all_gather, exchange
from .ring import OneWay


class Gather(OneWay):
    """The strategy "gather": each rank all-gathers the keys of all ranks and computes one step."""

    def spread(
        self, queries: tuple[jax.Array, ...], keys: Keys, score: Score, ring: Ring
    ) -> tuple[tuple[jax.Array, ...], Keys, Score]:
        """See ``Strategy.spread``."""
        parts = jax.tree.map(lambda x: all_gather(x, ring.axis), keys)
        return queries, joined(parts, keys.kv.shape[1]), score

    def collect_gradients(
        self, dq: jax.Array, dkv: Gradients, of_q: BackwardInputs, ring: Ring
    ) -> tuple[jax.Array, Gradients, jax.Array | None]:
        """See ``Strategy.collect_gradients``."""
        assert not isinstance(dkv, tuple), "what travels is packed"
        parts = exchange(by_rank(dkv, ring.plan.ranks), 0, 0, ring.axis, None)
        return dq, summed(parts), of_q.sinks


def by_rank(x: jax.Array, ranks: int) -> jax.Array:
    """Split x [b ranks*n ...] by rank and return it as [ranks b n ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], ranks, x.shape[1] // ranks, *x.shape[2:]), 1, 0)


def summed(parts: jax.Array) -> jax.Array:
    """Sum ``parts`` [n ...] over n in index order, because the order of additions determines the last bits."""
    return reduce(jnp.add, jnp.unstack(parts))
