"""The new tokens of a step, with their placement in a sharded cache, which ``cache/step.py`` of the core computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.cache import placement, step
from ring_attn_core.cache.step import ArrayOps, CachedRequests, StepArrays

DATA = ("positions", "k_positions", "before", "lengths", "chunk", "counts", "slots", "source", "owner_slots", "owners")
META = ("tokens", "layout", "length", "fresh", "ragged", "rows")


@partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=META)
@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeStep(StepArrays):
    """The new tokens of a step as a pytree. The step's requests are ``rows``, indices in the cache; None: all of them.

    ``ragged``: True if a request may have fewer tokens of the chunk than ``length``.
    """

    ragged: bool
    rows: tuple[int, ...] | None

    @property
    def into(self) -> jax.Array:
        rows = jnp.arange(len(self.chunk)) if self.rows is None else jnp.asarray(self.rows)
        return rows.astype(jnp.int32)[:, None]


def append_tokens(held: CachedRequests, tokens: int, valid: jax.Array | None) -> dict[str, Any]:
    """Return a DecodeStep's arrays by name, for ``tokens`` tokens on every rank, of which ``valid`` [b, tokens] are real."""
    return step.append_tokens(held, tokens, valid, jnp.asarray(placement.earlier(held.spec.ranks), jnp.int32), OPS)


def append_chunk(held: CachedRequests, chunk: jax.Array, layout: str, local: int) -> dict[str, Any]:
    """Return a DecodeStep's arrays by name, for a prefill of ``chunk`` [b] real tokens in shards of ``local`` in ``layout``."""
    return step.append_chunk(held, chunk, *shards(layout, held.spec.ranks, local), OPS)


def shards(layout: str, ranks: int, local: int) -> tuple[jax.Array, jax.Array]:
    """Return each rank's positions in a chunk, int32 [ranks, local], and the rank of each position, int16 [ranks * local]."""
    positions, owners = placement.positions(layout, ranks, local), placement.owners(layout, ranks, local)
    return jnp.asarray(positions, jnp.int32), jnp.asarray(owners, jnp.int16)


OPS = ArrayOps(
    jnp,
    jnp.arange,
    jnp.zeros,
    lax.convert_element_type,
    lambda x: x.astype(jnp.int32),
    gather=lambda x, index: jnp.take_along_axis(x, index, 1),
    scatter=lambda x, index, values: x.at[jnp.arange(len(x))[:, None], index].set(values, mode="drop"),
)
