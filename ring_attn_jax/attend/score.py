"""The parameters of dropout and of the scores s_ij, except q and k. They stay with the queries while keys travel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .dropout import DropoutState


class OwnTiles(NamedTuple):
    """The tokens on which a GPU kernel computes the results that this rank needs, by ``OwnRuns`` of the core. ``order`` [n]: the
    index of each in the whole array. ``places`` [s]: for each token of the whole array its index in ``order``, if it has one."""

    rows: jax.Array
    order: jax.Array
    places: jax.Array

    def take(self, x: jax.Array, dim: int = 1) -> jax.Array:
        return jnp.take(x, self.order, axis=dim, mode="clip")

    def put(self, x: jax.Array) -> jax.Array:
        """Return results [b n ...] of these tokens as those of the whole array [b s ...]."""
        return jnp.take(x, self.places, axis=1, mode="clip")


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["scale", "softcap", "dropout_rate"],
    data_fields=[
        *("extents", "sinks", "alibi_slopes", "dropout_seed", "positions", "step_positions"),
        *("own_queries", "own_keys", "query_tiles", "key_tiles"),
    ],
)
@dataclass(frozen=True)
class Score:
    """The parameters of a score and of dropout. A feature whose field is None is off, and so is dropout at rate 0.

    ``s_ij = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)`` if query i may see key j, else -inf. Without
    softcap the first term is ``scale q_i . k_j``.
    """

    scale: float
    softcap: float | None
    dropout_rate: float
    extents: jax.Array | None = None
    """int [b s 2]: the first and the end (exclusive) of the key positions (or local indices) that a query may see."""
    sinks: jax.Array | None = None
    """[h]: one more logit, without a value, in the softmax denominator of each query."""
    alibi_slopes: jax.Array | None = None
    """[h]: the ALiBi slopes, multiplied by ``k_pos - q_pos`` and added to the score."""
    dropout_seed: DropoutState | None = None
    positions: jax.Array | None = None
    """int32 [ranks * s]: the position of each token of a traced layout, in layout order; ``BEYOND`` (2^30) at padding."""
    step_positions: tuple[jax.Array, jax.Array] | None = None
    """int32 [s] and [t]: in a traced layout the positions of a step's queries and keys; the step's rows hold local indices."""
    own_queries: jax.Array | None = None
    own_keys: jax.Array | None = None
    """bool [s] and [t]: the tokens whose results this rank needs. A pair of tiles without one is skipped. Both None: all."""
    query_tiles: OwnTiles | None = None
    key_tiles: OwnTiles | None = None
    """The same for kernels. None: all tokens, by the rows of the step."""

    def of_heads(self, first: int | jax.Array, heads: int) -> Score:
        """Return the parameters of ``heads`` of the query heads, from ``first`` on."""
        cut = lambda x: None if x is None else lax.dynamic_slice_in_dim(x, first, heads)
        seed = self.dropout_seed
        return replace(
            self,
            sinks=cut(self.sinks),
            alibi_slopes=cut(self.alibi_slopes),
            dropout_seed=None if seed is None else seed._replace(head=seed.head + jnp.uint32(first)),
        )

    def needs(self, queries: Any, keys: Any) -> jax.Array | bool:
        """Return whether this rank needs results of a pair of tiles."""
        own = (self.own_queries, queries), (self.own_keys, keys)
        held = [lax.dynamic_slice_in_dim(x, tile.base, tile.index.size).any() for x, tile in own if x is not None]
        return reduce(or_, held) if held else True
