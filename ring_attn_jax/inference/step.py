"""Where the new tokens of a step go in a sharded cache: computed once on the device, used by every layer."""

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
class Step:
    """New tokens of some requests, and what the cache is once they are in it; ``KVCache.advance`` makes it so.

    ``positions`` int32 [requests, tokens]: where the tokens stand whose q, k and v this rank computes, for the rotary embedding
    and as ``q_positions``; -1 for what is no token. ``k_positions`` int32 [requests, slots]: of every slot, the new tokens
    included. Without a ``layout`` every rank computes the same ``tokens`` tokens; with one they are its shard of a chunk of
    ``length`` tokens, of which request i has ``chunk[i]``.
    """

    positions: jax.Array
    k_positions: jax.Array
    tokens: int
    layout: str | None
    length: int
    fresh: bool
    """Whether no request of the step has a token in the cache."""
    ragged: bool
    """Whether some request may have fewer tokens of the chunk than ``length``."""
    rows: tuple[int, ...] | None
    """The requests of the cache; None: all of them."""
    before: jax.Array
    """int32 [requests]: how long they are before the step."""
    lengths: jax.Array
    """int32 [requests]: and after it."""
    chunk: jax.Array
    """int32 [requests]: how many tokens each of them gets."""
    counts: jax.Array
    """int32 [requests, ranks]: how many slots of every rank are in use after it."""
    slots: jax.Array
    """int32 [requests, writes]: where this rank writes; beyond the slots for what others hold."""
    source: jax.Array | None
    """int32 [requests, writes]: which of ``tokens`` is written there; None: the same one."""
    owner_slots: jax.Array
    owners: jax.Array
    """int16 [requests, remembered]: the rank of every new token, and where the cache notes it."""

    @property
    def into(self) -> jax.Array:
        """Return int32 [requests, 1]: which requests of the cache they are."""
        rows = jnp.arange(len(self.chunk)) if self.rows is None else jnp.asarray(self.rows)
        return rows.astype(jnp.int32)[:, None]


@dataclass(frozen=True, eq=False)
class Held:
    """What the cache has of the requests of a step: positions [b, slots], counts [b, ranks], lengths [b]."""

    positions: jax.Array
    counts: jax.Array
    lengths: jax.Array
    spec: CacheSpec
    rank: jax.Array


def appended(held: Held, tokens: int, valid: jax.Array | None) -> dict[str, Any]:
    """The arrays of a step of ``tokens`` tokens that are the same on every rank, of which ``valid`` [b, tokens] are some."""
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
    levels = held.counts[..., None] + index[None]
    turns = placement.turns(held.counts, levels, jnp.asarray(placement.earlier(spec.ranks), jnp.int32)).astype(jnp.int32)
    taken = turns < chunk[:, None, None]
    writes = min(tokens, spec.slots)
    turn, here, level = (x[:, held.rank, :writes] for x in (turns, taken, levels))
    ranks = jnp.broadcast_to(jnp.arange(spec.ranks, dtype=jnp.int16)[None, :, None], turns.shape).reshape(batch, -1)
    row = jnp.arange(batch)[:, None]
    token = jnp.where(taken, turns, tokens).reshape(batch, -1)
    of_token = jnp.zeros((batch, tokens), jnp.int16).at[row, token].set(ranks, mode="drop")
    source = None
    if tokens > 1:
        source = jnp.where(here, turn, 0)
        source = source if order is None else jnp.take_along_axis(order, source, 1)
    return {
        "positions": positions,
        "source": source,
        "chunk": chunk,
        "counts": held.counts + taken.sum(-1, dtype=jnp.int32),
        "lengths": held.lengths + chunk,
        **_written(held, here, level, held.lengths[:, None] + turn),
        **_noted(held, chunk, of_token),
    }


def prefilled(held: Held, chunk: jax.Array, layout: str, local: int) -> dict[str, Any]:
    """The arrays of a step of shards of ``local`` tokens in ``layout``, of which request i has the first ``chunk[i]``."""
    spec = held.spec
    of_rank, owners = shards(layout, spec.ranks, local)
    mine = of_rank[held.rank]
    more = (of_rank[None] < chunk[:, None, None]).sum(-1, dtype=jnp.int32)
    own = more[:, held.rank, None]
    writes = min(local, spec.slots)
    index = own - writes + jnp.arange(writes, dtype=jnp.int32)[None]  # the last ones, where a window keeps no more
    source = jnp.maximum(index, 0)
    level = held.counts[:, held.rank, None] + index
    return {
        "positions": jnp.where(mine[None] < chunk[:, None], held.lengths[:, None] + mine[None], -1),
        "source": source,
        "chunk": chunk,
        "counts": held.counts + more,
        "lengths": held.lengths + chunk,
        **_written(held, index >= 0, level, held.lengths[:, None] + mine[source]),
        **_noted(held, chunk, jnp.broadcast_to(owners[None], (len(chunk), len(owners)))),
    }


def shards(layout: str, ranks: int, local: int) -> tuple[jax.Array, jax.Array]:
    """int32 [ranks, local]: the place of every token in a chunk; int16 [tokens]: the rank of every place."""
    of_rank, owners = placement.positions(layout, ranks, local), placement.owners(layout, ranks, local)
    return jnp.asarray(of_rank, jnp.int32), jnp.asarray(owners, jnp.int16)


def _written(held: Held, here: jax.Array, level: jax.Array, position: jax.Array) -> dict[str, jax.Array]:
    """Where this rank writes, and the positions of its slots after that; what is not ``here`` goes beyond the slots, nowhere."""
    slots = jnp.where(here, level % held.spec.slots, held.spec.slots)
    row = jnp.arange(len(slots))[:, None]
    return {"slots": slots, "k_positions": held.positions.at[row, slots].set(position.astype(jnp.int32), mode="drop")}


def _noted(held: Held, chunk: jax.Array, of_token: jax.Array) -> dict[str, jax.Array]:
    """Where the cache notes the ranks ``of_token`` [b, tokens], of as many of the last ones as it remembers."""
    remembered, tokens = held.spec.remembered, of_token.shape[1]
    kept = min(tokens, remembered)
    token = chunk[:, None] - kept + jnp.arange(kept, dtype=jnp.int32)[None]
    slot = jnp.where(token >= 0, (held.lengths[:, None] + token) % remembered, remembered)
    return {"owner_slots": slot, "owners": jnp.take_along_axis(of_token, jnp.maximum(token, 0), 1)}
