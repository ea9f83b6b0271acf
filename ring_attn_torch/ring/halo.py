"""The exchange of the tokens before each run, and of their gradients: one all-gather each, of equal size on every rank."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ring_attn_core.plan.run_order import RunOrder

from . import collectives
from .groups import Group, group_of, rank_in, ranks_of


def all_gather(x: Tensor, ring: Group) -> Tensor:
    """Concatenate the arrays [batch, n, ...] of all ranks along dim 1."""
    if ring is None or ranks_of(ring) == 1:
        return x
    sent = x.contiguous()
    sent = sent.view(torch.uint8) if x.dtype == torch.bool else sent
    arrived = sent.new_empty(ranks_of(ring) * x.shape[0], *x.shape[1:])
    collectives.all_gather_single(arrived, sent, group=ring)
    return torch.cat(arrived.view(x.dtype).chunk(ranks_of(ring)), 1)


def exchange_halo(x: Tensor, order: RunOrder, width: int, ring: Group) -> Tensor:
    """Return the ``width`` tokens before each run of this rank, [batch, runs, width, ...], 0 before the sequence; differentiable.

    ``x``: this rank's shard [batch, tokens, ...]. A token's gradient adds, in at least float32, those of all halos that hold it,
    in the order of the ranks and runs that read it.
    """
    return _Halo.apply(x, order, width, "" if ring is None else ring.group_name)  # type: ignore[no-any-return]


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the entries of dim 1 at ``index`` [n, ...], 0 where the index is -1: [batch, n, ..., *x.shape[2:]]."""
    if not x.shape[1]:
        return x.new_zeros(x.shape[0], *index.shape, *x.shape[2:])
    found = x.index_select(1, index.flatten().clamp(min=0)).unflatten(1, index.shape)
    return torch.where((index >= 0).view(1, *index.shape, *[1] * (x.ndim - 2)), found, 0)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@lru_cache(maxsize=64)
def _tables(order: RunOrder, width: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    halo = order.halo(width)
    sent = [place for place, token in enumerate(halo.tails[rank]) if token >= 0]
    tables = halo.tails[rank], halo.sources[rank], halo.readers[rank], sent
    return tuple(torch.tensor(table, dtype=torch.long, device=device) for table in tables)


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: RunOrder, width: int, name: str) -> Tensor:
        ring = group_of(name)
        tails, sources, _, _ = _tables(order, width, rank_in(ring), x.device)
        ctx.kept = order, width, name, x.shape, x.dtype
        return take(all_gather(take(x, tails), ring), sources).unflatten(1, (-1, width))

    @staticmethod
    def backward(ctx: Any, dhalo: Tensor) -> tuple[Tensor | None, ...]:
        order, width, name, shape, dtype = ctx.kept
        ring = group_of(name)
        tails, _, readers, sent = _tables(order, width, rank_in(ring), dhalo.device)
        dread = all_gather(wide(dhalo).flatten(1, 2), ring)
        dx = dread.new_zeros(shape)
        dtails = sum((take(dread, each) for each in readers), dread.new_zeros(shape[0], tails.numel(), *shape[2:]))
        return dx.index_copy_(1, tails[sent], dtails[:, sent]).to(dtype), None, None, None
