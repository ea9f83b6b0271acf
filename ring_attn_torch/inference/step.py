"""The placement of a step's new tokens in a sharded cache: computed once on the device and used by every layer.

``cache/placement.py`` of the core has the rule that gives each token its rank and its slot. The CUDA graph of a step is in
``decode_loop.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ring_attn_core.cache import placement
from ring_attn_core.cache.spec import CacheSpec


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """The new tokens of a step, and the arrays of the cache after the step; ``KVCache.advance`` stores these arrays in the cache.

    ``positions`` int32 [requests, tokens]: the positions of the tokens whose q, k and v this rank computes, for the rotary
    embedding and as ``q_positions``; -1 for padding. ``k_positions`` int32 [requests, slots]: the position of the token in each
    slot, new tokens included. If ``layout`` is None, every rank computes the same ``tokens`` tokens of each request.
    Otherwise each request has a chunk of at most ``length`` tokens, and each rank computes a shard of ``tokens`` tokens of the
    padded chunk. Only the first ``chunk[i]`` tokens of request i's chunk are new tokens; the rest is padding.
    """

    positions: Tensor
    k_positions: Tensor
    tokens: int
    layout: str | None
    length: int
    fresh: bool
    """True in a prefill step whose requests have no tokens in the cache, as far as the host knows; else False."""
    rows: Tensor | None
    """The step's requests, as indices in the cache, int64 [requests]; None: all requests of the cache."""
    into: Tensor
    of: Tensor
    """int64 [requests, 1]: the requests as indices into the cache (``into``) and into the step (``of``)."""
    before: Tensor
    """Lengths of the requests before the step, int32 [requests]."""
    lengths: Tensor
    """Lengths of the requests after the step, int32 [requests]."""
    chunk: Tensor
    """Number of new tokens of each request, int32 [requests], including tokens that do not fit."""
    counts: Tensor
    """Number of tokens that each rank has stored after the step, int32 [requests, ranks]; the next ``KVCache.counts``."""
    slots: Tensor
    """Slots that this rank writes, int64 [requests, writes]. The last slot absorbs tokens that this rank does not cache."""
    source: Tensor | None
    """Index, among the step's tokens, of the token written to each slot, int64 [requests, writes].

    None in a step of one token without a layout.
    """
    owner_slots: Tensor
    owners: Tensor
    """The ranks that cache the newest tokens, int16 [requests, owners]; ``owner_slots``: where ``KVCache.owners`` stores them."""
    certain: bool = True
    """True if the host knows that some request gets a token. With ``valid`` only the device knows."""
    version: int = 0
    """The cache's ``version`` when the step was made; the cache refuses a step of another version."""
    host: tuple[tuple[int, ...], tuple[tuple[int, ...], ...] | None] = ((), None)
    """The requests as ints, and the number of tokens of each chunk on each rank, [requests][ranks], or None without a layout."""
    written: set[int] = field(default_factory=set)
    """The layers written so far."""


@dataclass(frozen=True, eq=False)
class CachedRequests:
    """The state of a step's requests before the step: positions [b, slots], counts [b, ranks], lengths [b]."""

    positions: Tensor
    counts: Tensor
    lengths: Tensor
    spec: CacheSpec
    rank: int


def appended(held: CachedRequests, tokens: int, valid: Tensor | None) -> dict[str, Tensor | None]:
    """Return a DecodeStep's tensor fields for ``tokens`` tokens that every rank computes. ``valid`` bool [b, tokens] or None."""
    spec, device = held.spec, held.counts.device
    if valid is None:
        chunk = torch.full_like(held.lengths, tokens)
        index = torch.arange(tokens, device=device, dtype=torch.int32).expand(len(chunk), -1)
        positions = held.lengths[:, None] + index
        order = None
    else:
        number = valid.cumsum(1, dtype=torch.int32)
        chunk = number[:, -1]
        positions = torch.where(valid, held.lengths[:, None] + number - 1, -1)
        order = torch.argsort(~valid, dim=1, stable=True)
    stored = _fitting(chunk, held, (spec.slots - held.counts).clip(0).sum(-1, dtype=torch.int32))
    slot_indices = held.counts[..., None] + torch.arange(tokens, device=device, dtype=torch.int32)
    append_indices = placement.append_indices(held.counts, slot_indices, _earlier(spec.ranks, device))
    taken = append_indices < stored[:, None, None]
    writes = min(tokens, spec.slots)
    append_index, here = append_indices[:, held.rank, :writes], taken[:, held.rank, :writes]
    slot_index = slot_indices[:, held.rank, :writes]
    ranks = torch.arange(spec.ranks, device=device, dtype=torch.int16)[None, :, None].expand_as(append_indices).flatten(1)
    nobody = append_indices.new_zeros((len(chunk), tokens + 1), dtype=torch.int16)
    of_token = nobody.scatter(1, torch.where(taken, append_indices, tokens).flatten(1), ranks)[:, :tokens]
    source = None
    if tokens > 1:
        source = torch.where(here, append_index, 0)
        source = source if order is None else order.gather(1, source)
    return {
        "positions": positions,
        "source": source,
        "chunk": chunk,
        "counts": held.counts + taken.sum(-1, dtype=torch.int32),
        "lengths": held.lengths + stored,
        **_written(held, here, slot_index, held.lengths[:, None] + append_index),
        **_recorded_owners(held, stored, of_token),
    }


def prefilled(held: CachedRequests, chunk: Tensor, layout: str, local: int) -> dict[str, Tensor | None]:
    """Return a DecodeStep's tensor fields for a prefill by shards of ``local`` tokens. ``chunk`` int32 [b]: without padding."""
    spec, device = held.spec, held.counts.device
    of_rank, owners = shards(layout, spec.ranks, local, device)
    mine = of_rank[held.rank]
    stored = _fitting(chunk, held, spec.remembered - held.lengths)
    more = (of_rank < stored[:, None, None]).sum(-1, dtype=torch.int32)
    own = more[:, held.rank, None]
    writes = min(local, spec.slots)
    skipped = 0 if spec.window is None else own - writes  # a window may keep the newest tokens of a chunk only
    index = skipped + torch.arange(writes, device=device, dtype=torch.int32)
    here = (index >= 0) & (index < own)
    source = index.clamp(min=0).long()
    slot_index = held.counts[:, held.rank, None] + index
    return {
        "positions": torch.where(mine < chunk[:, None], held.lengths[:, None] + mine, -1),
        "source": source,
        "chunk": chunk,
        "counts": held.counts + more,
        "lengths": held.lengths + stored,
        **_written(held, here, slot_index, held.lengths[:, None] + mine[source]),
        **_recorded_owners(held, stored, owners.expand(len(chunk), -1)),
    }


def _fitting(chunk: Tensor, held: CachedRequests, room: Tensor) -> Tensor:
    """Return the number of new tokens of each request, [b], that the cache stores; without a window at most the ``room`` [b]. New
    tokens beyond the room are neither cached nor counted, and overwrite nothing."""
    return torch.minimum(chunk, room) if held.spec.window is None else chunk


def _written(held: CachedRequests, here: Tensor, slot_index: Tensor, position: Tensor) -> dict[str, Tensor | None]:
    """Return the slots that this rank writes, and ``k_positions`` after the write. ``here`` [b, writes]: this rank caches the
    token. Tokens of other ranks, and without a window those beyond the last free slot, go to the extra last slot, always empty.
    """
    here = here if held.spec.window is not None else here & (slot_index < held.spec.slots)
    slots = torch.where(here, slot_index % held.spec.slots, held.spec.slots).long()
    position = torch.where(here, position, -1).to(torch.int32)
    return {"slots": slots, "k_positions": held.positions.scatter(1, slots, position)}


def _recorded_owners(held: CachedRequests, chunk: Tensor, of_token: Tensor) -> dict[str, Tensor | None]:
    """Return the ranks of the newest tokens, and their indices in the ring buffer ``KVCache.owners``; the last index is for
    padding. ``chunk`` [b]: new tokens of each request. ``of_token`` [b, tokens]: the rank that owns each."""
    remembered, tokens = held.spec.remembered, of_token.shape[1]
    count = min(tokens, remembered)
    token = chunk[:, None] - count + torch.arange(count, device=chunk.device, dtype=torch.int32)
    slot = torch.where(token >= 0, (held.lengths[:, None] + token) % remembered, remembered)
    return {"owner_slots": slot.long(), "owners": of_token.gather(1, token.clamp(min=0).long())}


@lru_cache(maxsize=256)
def known_rows(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``rows`` as int64 [requests] on the device. Cache the tensor, since each copy to a GPU waits for the device."""
    return torch.tensor(rows, device=device)


@lru_cache(maxsize=256)
def _earlier(ranks: int, device: torch.device) -> Tensor:
    return torch.tensor(placement.earlier(ranks), dtype=torch.int32, device=device)


@lru_cache(maxsize=256)
def shards(layout: str, ranks: int, local: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of each rank's tokens, int32 [ranks, local], and each position's rank, int16 [ranks * local]."""
    of_rank: Sequence[Sequence[int]] = placement.positions(layout, ranks, local)
    owners = placement.owners(layout, ranks, local)
    as_tensor = lambda x, dtype: torch.tensor(x, dtype=dtype, device=device)
    return as_tensor(of_rank, torch.int32), as_tensor(owners, torch.int16)
