"""The placement of a step's new tokens by ``placement.py``, on arrays of either framework, once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import placement
from .spec import CacheSpec


class ArrayOps(NamedTuple):
    """The functions of a framework's arrays, on one device, whose names or arguments differ between the frameworks."""

    xp: Any
    """The module jax.numpy or torch."""
    arange: Callable[..., Any]
    zeros: Callable[..., Any]
    cast: Callable[[Any, Any], Any]
    index: Callable[[Any], Any]
    """Converts integers to a dtype that may be used as indices."""
    gather: Callable[[Any, Any], Any]
    """``gather(x, index)[i, j] = x[i, index[i, j]]``"""
    scatter: Callable[[Any, Any, Any], Any]
    """``scatter(x, index, values)``: a copy of x with ``x[i, index[i, j]] = values[i, j]``. If the index is the cache's number of
    slots, the value is dropped, or written to an extra last slot."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepArrays:
    """The new tokens of a step, and the arrays of the cache after it; ``KVCache.advance`` stores these arrays in the cache.

    Without ``layout`` every rank computes the same ``tokens`` tokens of each request. With it, each request has a chunk of at
    most ``length`` tokens, and each rank computes a shard of ``tokens`` tokens of the padded chunk. The first ``chunk[i]`` tokens
    of request i's chunk are new; the rest is padding.
    """

    positions: Any
    """The positions of the tokens whose q, k and v this rank computes, int32 [requests, tokens]; -1 for padding."""
    k_positions: Any
    """The position of the token in each slot, new tokens included, int32 [requests, slots]."""
    tokens: int
    layout: str | None
    length: int
    fresh: bool
    """True if none of the requests has a token in the cache, as far as the host knows or the caller asserts."""
    before: Any
    """Lengths of the requests before the step, int32 [requests]."""
    lengths: Any
    """Lengths of the requests after the step, int32 [requests]."""
    chunk: Any
    """Number of new tokens of each request, int32 [requests], including tokens that do not fit."""
    counts: Any
    """Number of tokens that each rank has stored after the step, int32 [requests, ranks]; the next ``KVCache.counts``."""
    slots: Any
    """Slots that this rank writes, [requests, writes]. Tokens that it does not cache have an index beyond the cache's slots."""
    source: Any
    """Index, among the step's tokens, of the token written to each slot, [requests, writes].

    None in a step of one token without a layout.
    """
    owner_slots: Any
    owners: Any
    """The ranks that cache the newest tokens, int16 [requests, owners]; ``owner_slots``: where ``KVCache.owners`` stores them."""


@dataclass(frozen=True, eq=False)
class CachedRequests:
    """The state of a step's requests before the step: positions [b, slots], counts [b, ranks], lengths [b]."""

    positions: Any
    counts: Any
    lengths: Any
    spec: CacheSpec
    rank: Any

    def fitting(self, chunk: Any, room: Any, xp: Any) -> Any:
        """Return the number of each request's new tokens that the cache stores, [b]. Without a window it has ``room`` [b]."""
        return xp.minimum(chunk, room) if self.spec.window is None else chunk


def append_tokens(held: CachedRequests, tokens: int, valid: Any, earlier: Any, ops: ArrayOps) -> dict[str, Any]:
    """Return the arrays of a StepArrays by name, for ``tokens`` tokens that every rank computes.
    ``valid`` bool [b, tokens]: the real ones; None: all. ``earlier``: the array of ``placement.earlier``."""
    spec, xp = held.spec, ops.xp
    index, order = ops.arange(tokens, dtype=xp.int32)[None], None
    if valid is None:
        chunk, positions = xp.full_like(held.lengths, tokens), held.lengths[:, None] + index
    else:
        number = valid.cumsum(1, dtype=xp.int32)
        chunk, positions = number[:, -1], xp.where(valid, held.lengths[:, None] + number - 1, -1)
        order = xp.argsort(~valid, stable=True)
    stored = held.fitting(chunk, (spec.slots - held.counts).clip(0).sum(-1, dtype=xp.int32), xp)
    slot_indices = held.counts[..., None] + index[None]
    append_indices = ops.cast(placement.append_indices(held.counts, slot_indices, earlier), xp.int32)
    taken = append_indices < stored[:, None, None]
    writes = min(tokens, spec.slots)
    append_index, here, slot_index = (x[:, held.rank, :writes] for x in (append_indices, taken, slot_indices))
    batch = len(held.lengths)
    ranks = xp.broadcast_to(ops.arange(spec.ranks, dtype=xp.int16)[None, :, None], append_indices.shape).reshape(batch, -1)
    token = ops.index(xp.where(taken, append_indices, tokens).reshape(batch, -1))
    owners = ops.scatter(ops.zeros((batch, tokens + 1), dtype=xp.int16), token, ranks)[:, :tokens]
    source = None
    if tokens > 1:
        source = ops.index(xp.where(here, append_index, 0))
        source = source if order is None else ops.gather(ops.index(order), source)
    return {
        "positions": positions,
        "source": source,
        "chunk": chunk,
        "counts": held.counts + taken.sum(-1, dtype=xp.int32),
        "lengths": held.lengths + stored,
        **_write_slots(held, here, slot_index, held.lengths[:, None] + append_index, ops),
        **_record_owners(held, stored, owners, ops),
    }


def append_chunk(held: CachedRequests, chunk: Any, places: Any, owners: Any, ops: ArrayOps) -> dict[str, Any]:
    """Return the arrays of a StepArrays by name, for a sharded chunk with ``chunk`` int32 [b] real tokens of each request.
    ``places`` int32 [ranks, tokens]: each rank's positions in the chunk. ``owners`` int16 [positions]: the rank of each."""
    spec, xp = held.spec, ops.xp
    mine = places[held.rank]
    stored = held.fitting(chunk, spec.remembered - held.lengths, xp)
    more = (places[None] < stored[:, None, None]).sum(-1, dtype=xp.int32)
    own = more[:, held.rank, None]
    writes = min(len(mine), spec.slots)
    skipped = 0 if spec.window is None else own - writes  # a window may keep the newest tokens of a chunk only
    index = skipped + ops.arange(writes, dtype=xp.int32)[None]
    source = ops.index(index.clip(0))
    here, slot_index = (index >= 0) & (index < own), held.counts[:, held.rank, None] + index
    return {
        "positions": xp.where(mine[None] < chunk[:, None], held.lengths[:, None] + mine[None], -1),
        "source": source,
        "chunk": chunk,
        "counts": held.counts + more,
        "lengths": held.lengths + stored,
        **_write_slots(held, here, slot_index, held.lengths[:, None] + mine[source], ops),
        **_record_owners(held, stored, xp.broadcast_to(owners[None], (len(chunk), len(owners))), ops),
    }


def _write_slots(held: CachedRequests, here: Any, slot_index: Any, position: Any, ops: ArrayOps) -> dict[str, Any]:
    """Return the slots that this rank writes, and ``k_positions`` after the write.
    ``here`` [b, writes]: this rank caches the token; ``slot_index``: its slot, with a window modulo the slots."""
    spec, xp = held.spec, ops.xp
    here = here if spec.window is not None else here & (slot_index < spec.slots)
    slots = ops.index(xp.where(here, slot_index % spec.slots, spec.slots))
    position = ops.cast(xp.where(here, position, -1), xp.int32)
    return {"slots": slots, "k_positions": ops.scatter(held.positions, slots, position)}


def _record_owners(held: CachedRequests, chunk: Any, owners: Any, ops: ArrayOps) -> dict[str, Any]:
    """Return the ranks of the newest tokens, and their indices in the ring buffer ``KVCache.owners``; the last is for padding.
    ``chunk`` [b]: new tokens of each request. ``owners`` [b, tokens]: the rank that owns each."""
    remembered, tokens = held.spec.remembered, owners.shape[1]
    count = min(tokens, remembered)
    token = chunk[:, None] - count + ops.arange(count, dtype=ops.xp.int32)[None]
    slot = ops.xp.where(token >= 0, (held.lengths[:, None] + token) % remembered, remembered)
    return {"owner_slots": ops.index(slot), "owners": ops.gather(owners, ops.index(token.clip(0)))}
