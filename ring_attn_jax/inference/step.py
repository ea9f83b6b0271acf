"""The placement of a step's new tokens in a sharded cache: computed once on the device and used by every layer.

``cache/placement.py`` of the core has the rule that gives each token its rank and its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ring_attn_core.cache import placement
from ring_attn_core.cache.spec import CacheSpec

DATA = ("positions", "k_positions", "before", "lengths", "chunk", "counts", "slots", "source", "owner_slots", "owners")
META = ("tokens", "layout", "length", "fresh", "ragged", "rows")


@partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=META)
@dataclass(frozen=True, eq=False)
class DecodeStep:
    """The new tokens of a step, and the arrays of the cache after it; ``KVCache.advance`` stores these arrays in the cache.

    ``positions`` int32 [requests, tokens] of this rank's tokens, -1 for padding. ``k_positions`` int32 [requests, slots] of the
    slots' tokens, new ones included. Without ``layout`` every rank computes the same ``tokens`` tokens; with it, a shard of
    ``tokens`` tokens of a padded chunk of at most ``length``, whose first ``chunk[i]`` tokens are new.
    """

    positions: jax.Array
    k_positions: jax.Array
    tokens: int
    layout: str | None
    length: int
    fresh: bool
    """True if none of the requests has a token in the cache, as the caller asserts."""
    ragged: bool
    """True if a request may have fewer tokens of the chunk than ``length``."""
    rows: tuple[int, ...] | None
    """The step's requests, as indices in the cache; None: all requests of the cache."""
    before: jax.Array
    """Lengths of the requests before the step, int32 [requests]."""
    lengths: jax.Array
    """Lengths of the requests after the step, int32 [requests]."""
    chunk: jax.Array
    """Number of new tokens of each request, int32 [requests], including tokens that do not fit."""
    counts: jax.Array
    """Number of tokens that each rank has stored after the step, int32 [requests, ranks]; the next ``KVCache.counts``."""
    slots: jax.Array
    """Slots that this rank writes, int32 [requests, writes]. Tokens of other ranks have an index beyond the slots."""
    source: jax.Array | None
    """Index, among the step's tokens, of the token written to each slot, int32 [requests, writes].

    None in a step of one token without a layout.
    """
    owner_slots: jax.Array
    owners: jax.Array
    """The ranks that cache the newest tokens, int16 [requests, owners]; ``owner_slots``: where ``KVCache.owners`` stores them."""

    @property
    def into(self) -> jax.Array:
        """The requests' indices in the cache, int32 [requests, 1]."""
        rows = jnp.arange(len(self.chunk)) if self.rows is None else jnp.asarray(self.rows)
        return rows.astype(jnp.int32)[:, None]


@dataclass(frozen=True, eq=False)
class CachedRequests:
    """The state of a step's requests before the step: positions [b, slots], counts [b, ranks], lengths [b]."""

    positions: jax.Array
    counts: jax.Array
    lengths: jax.Array
    spec: CacheSpec
    rank: jax.Array


def appended(held: CachedRequests, tokens: int, valid: jax.Array | None) -> dict[str, Any]:
    """Return a DecodeStep's arrays by name, for ``tokens`` tokens on every rank, of which ``valid`` [b, tokens] are real."""
    spec, batch = held.spec, len(held.lengths)
    index = jnp.arange(tokens, dtype=jnp.int32)[None]
    if valid is None:
        chunk = jnp.full_like(held.lengths, tokens)
        positions = held.lengths[:, None] + index
        order = None
    else:
        number = jnp.cumsum(valid, 1, dtype=jnp.int32)
        chunk = number[:, -1]
        positions = jnp.where(valid, held.lengths[:, None] + number - 1, -1)
        order = jnp.argsort(~valid, axis=1, stable=True).astype(jnp.int32)
    stored = _fitting(chunk, held, (spec.slots - held.counts).clip(0).sum(-1, dtype=jnp.int32))
    slot_indices = held.counts[..., None] + index[None]
    append_indices = placement.append_indices(
        held.counts, slot_indices, jnp.asarray(placement.earlier(spec.ranks), jnp.int32)
    ).astype(jnp.int32)
    taken = append_indices < stored[:, None, None]
    writes = min(tokens, spec.slots)
    append_index, here, slot_index = (x[:, held.rank, :writes] for x in (append_indices, taken, slot_indices))
    ranks = jnp.broadcast_to(jnp.arange(spec.ranks, dtype=jnp.int16)[None, :, None], append_indices.shape).reshape(batch, -1)
    row = jnp.arange(batch)[:, None]
    token = jnp.where(taken, append_indices, tokens).reshape(batch, -1)
    of_token = jnp.zeros((batch, tokens), jnp.int16).at[row, token].set(ranks, mode="drop")
    source = None
    if tokens > 1:
        source = jnp.where(here, append_index, 0)
        source = source if order is None else jnp.take_along_axis(order, source, 1)
    return {
        "positions": positions,
        "source": source,
        "chunk": chunk,
        "counts": held.counts + taken.sum(-1, dtype=jnp.int32),
        "lengths": held.lengths + stored,
        **_written(held, here, slot_index, held.lengths[:, None] + append_index),
        **_recorded_owners(held, stored, of_token),
    }


def prefilled(held: CachedRequests, chunk: jax.Array, layout: str, local: int) -> dict[str, Any]:
    """Return a DecodeStep's arrays by name, for a prefill of ``chunk`` [b] real tokens in shards of ``local`` in ``layout``."""
    spec = held.spec
    of_rank, owners = shards(layout, spec.ranks, local)
    mine = of_rank[held.rank]
    stored = _fitting(chunk, held, spec.remembered - held.lengths)
    more = (of_rank[None] < stored[:, None, None]).sum(-1, dtype=jnp.int32)
    own = more[:, held.rank, None]
    writes = min(local, spec.slots)
    skipped = 0 if spec.window is None else own - writes  # a window may keep the newest tokens of a chunk only
    index = skipped + jnp.arange(writes, dtype=jnp.int32)[None]
    source = jnp.maximum(index, 0)
    slot_index = held.counts[:, held.rank, None] + index
    return {
        "positions": jnp.where(mine[None] < chunk[:, None], held.lengths[:, None] + mine[None], -1),
        "source": source,
        "chunk": chunk,
        "counts": held.counts + more,
        "lengths": held.lengths + stored,
        **_written(held, (index >= 0) & (index < own), slot_index, held.lengths[:, None] + mine[source]),
        **_recorded_owners(held, stored, jnp.broadcast_to(owners[None], (len(chunk), len(owners)))),
    }


def shards(layout: str, ranks: int, local: int) -> tuple[jax.Array, jax.Array]:
    """Return each rank's positions in a chunk, int32 [ranks, local], and the rank of each position, int16 [ranks * local]."""
    of_rank, owners = placement.positions(layout, ranks, local), placement.owners(layout, ranks, local)
    return jnp.asarray(of_rank, jnp.int32), jnp.asarray(owners, jnp.int16)


def _fitting(chunk: jax.Array, held: CachedRequests, room: jax.Array) -> jax.Array:
    """Return the number of new tokens of each request that the cache stores, [b]; tokens beyond the room are not cached."""
    return jnp.minimum(chunk, room) if held.spec.window is None else chunk


def _written(held: CachedRequests, here: jax.Array, slot_index: jax.Array, position: jax.Array) -> dict[str, jax.Array]:
    """Return {"slots": the slots that this rank writes, "k_positions": the position of each slot's token after the write}.

    ``here`` [b, writes]: this rank caches the token; ``slot_index``: its slot, modulo the slots. A token not cached gets an index
    beyond the slots, and the scatter drops it. With a window, a token overwrites the oldest slot.
    """
    here = here if held.spec.window is not None else here & (slot_index < held.spec.slots)
    slots = jnp.where(here, slot_index % held.spec.slots, held.spec.slots)
    row = jnp.arange(len(slots))[:, None]
    return {"slots": slots, "k_positions": held.positions.at[row, slots].set(position.astype(jnp.int32), mode="drop")}


def _recorded_owners(held: CachedRequests, chunk: jax.Array, of_token: jax.Array) -> dict[str, jax.Array]:
    """Return {"owners": the ranks of the newest tokens, "owner_slots": their indices in the ring buffer ``KVCache.owners``}.

    ``chunk`` [b]: the number of new tokens. ``of_token`` [b, tokens]: their ranks. The scatter drops padding, past the end.
    """
    remembered, tokens = held.spec.remembered, of_token.shape[1]
    count = min(tokens, remembered)
    token = chunk[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
    slot = jnp.where(token >= 0, (held.lengths[:, None] + token) % remembered, remembered)
    return {"owner_slots": slot, "owners": jnp.take_along_axis(of_token, jnp.maximum(token, 0), 1)}
