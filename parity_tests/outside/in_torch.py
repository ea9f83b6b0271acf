"""Functions of whole tensors over a ring of processes, each of which runs every case of a suite on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_torch import from_layout, to_layout

from .one import SETTINGS, in_place

LAYOUT = "zigzag"
dist.init_process_group("gloo", timeout=timedelta(minutes=5))


def own(whole: Tensor, dim: int) -> Tensor:
    """Return this rank's shard of a whole tensor."""
    return to_layout(whole, LAYOUT, SETTINGS.ranks, dim=dim).chunk(SETTINGS.ranks, dim)[dist.get_rank()].contiguous()


def join(shard: Tensor, dim: int, length: int) -> Tensor:
    """Return the whole tensor, of ``length`` tokens, of all ranks' shards."""
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(SETTINGS.ranks)]
    dist.all_gather(shards, shard.contiguous())
    return from_layout(torch.cat(shards, dim), LAYOUT, SETTINGS.ranks, length, dim=dim)


class Own(torch.autograd.Function):
    """``own``. Its backward joins the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.length = dim, whole.shape[dim]
        return own(whole, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return join(grad, ctx.dim, ctx.length), None


class Join(torch.autograd.Function):
    """``join``. Every rank has the same gradient of the whole; its backward takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, length: int) -> Tensor:
        ctx.dim = dim
        return join(shard, dim, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own(grad, ctx.dim), None, None


def attend(function: Callable[..., Any], qkv: Sequence[Tensor], dim: int, **arguments: Any) -> Any:
    """Call one of our functions on the shards of whole q, k and v, whose tokens are dim ``dim``. Join its first result, and its
    second, a log-sum-exp, whose tokens are its last dim."""
    queries, keys = (x.shape[dim] for x in qkv[:2])
    shards = [Own.apply(x, dim) for x in qkv]
    found = in_place(function, *shards, layout=LAYOUT, length=queries, kv_length=keys, **arguments)
    if isinstance(found, Tensor):
        return Join.apply(found, dim, queries)
    out, lse, *rest = found
    return Join.apply(out, dim, queries), Join.apply(lse, lse.ndim - 1, queries), *rest
