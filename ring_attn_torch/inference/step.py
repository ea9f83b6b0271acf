"""The new tokens of a step, placed in a sharded cache by ``cache/step.py`` of the core."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ring_attn_core.cache import placement, step
from ring_attn_core.cache.step import ArrayOps, CachedRequests, StepArrays


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeStep(StepArrays):
    """The new tokens of a step, with what the host knows of them. Indices such as ``slots`` are int64."""

    rows: Tensor | None
    """The step's requests, as indices in the cache, int64 [requests]; None: all requests of the cache."""
    into: Tensor
    in_step: Tensor
    """int64 [requests, 1]: the requests as indices into the cache (``into``) and into the step (``in_step``)."""
    certain: bool = True
    """True if the host knows that some request gets a token. With ``valid`` only the device knows."""
    version: int = 0
    """The cache's ``version`` when the step was made; the cache refuses a step of another version."""
    host: tuple[tuple[int, ...], tuple[tuple[int, ...], ...] | None] = ((), None)
    """The requests as ints, and the number of tokens of each chunk on each rank, [requests][ranks], or None without a layout."""
    written: set[int] = field(default_factory=set)


def append_tokens(held: CachedRequests, tokens: int, valid: Tensor | None) -> dict[str, Any]:
    device = held.counts.device
    return step.append_tokens(held, tokens, valid, _earlier(held.spec.ranks, device), _ops(device))


def append_chunk(held: CachedRequests, chunk: Tensor, layout: str, local: int) -> dict[str, Any]:
    device = held.counts.device
    return step.append_chunk(held, chunk, *shards(layout, held.spec.ranks, local, device), _ops(device))


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
    positions, owners = placement.positions(layout, ranks, local), placement.owners(layout, ranks, local)
    return torch.tensor(positions, dtype=torch.int32, device=device), torch.tensor(owners, dtype=torch.int16, device=device)


@lru_cache(maxsize=256)
def _ops(device: torch.device) -> ArrayOps:
    arange, zeros = partial(torch.arange, device=device), partial(torch.zeros, device=device)
    gather, scatter = lambda x, index: x.gather(1, index), lambda x, index, values: x.scatter(1, index, values)
    return ArrayOps(torch, arange, zeros, torch.Tensor.to, torch.Tensor.long, gather=gather, scatter=scatter)
