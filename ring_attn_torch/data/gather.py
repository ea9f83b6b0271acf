"""All-gather shards into global sequences in natural order, or gather one token of each row."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.layouts import gathered_length, token_position
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.problem.checks import check_along

from ..ring import collectives
from ..ring.agreement import AgreedCall, agree_on
from ..ring.groups import Group, group_of, is_dtensor, rank_in, ranks_of, ring_of
from ..ring.halo import all_gather
from .layout import from_layout, positions


def gather(
    x: Tensor,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str | BalancedLayout = "zigzag",
    length: int | None = None,
) -> Tensor:
    """Gather the shards [batch, tokens, ...] of all ranks into [batch, length, ...] in natural order, on every rank.

    ``group``: the ring; None is the default group. ``layout``: a name, or the ``.layout`` of a shard. ``length``: the global
    number of tokens without padding. None: the number of tokens of all shards or, for a balanced layout, the layout's length.

    Differentiable: the gradient of a shard is the sum over all ranks, in at least float32, of the gradients of its tokens. So if
    every rank computes the same loss from the global array and calls ``backward``, the gradient is ``ranks`` times that of one
    device: divide the loss by ``ranks``. ``loss(..., group=group)`` does so already, because it counts the labels of every rank.

    Raise ValueError, the same on every rank and before anything is sent, if ``x`` cannot be a shard of ``length`` tokens in
    ``layout``, or if ranks pass shards of different shapes or different arguments. Ranks compare shapes and arguments only the
    first time that they make such a call.
    """
    ring = ring_of(group)
    _check("gather", x, ring, layout, length)
    ranks = ranks_of(ring)
    whole: Any = x if ranks == 1 else AllGather.apply(x, ring)
    return from_layout(whole, layout, ranks, gathered_length(tuple(x.shape), layout, ranks, length))


def gather_token(
    x: Tensor,
    position: int | Tensor = -1,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str | BalancedLayout = "zigzag",
    length: int | None = None,
) -> Tensor:
    """Gather one token of each row from the shards [batch, tokens, ...] of all ranks. Return [batch, ...] on every rank.

    ``position``: the global position of the token. An int applies to all rows; a negative int counts from the end, so -1 is the
    last token. An integer tensor [batch] holds one position per row; a row gets 0 if its position is outside 0 .. length - 1.
    Each rank sends one token per row. For example, the logits of the last token are
    ``gather_token(model(ids, ..., return_hidden=True), length=length) @ model.head_weight.T``.

    ``group``, ``layout``, ``length``, gradient and errors are those of :func:`gather`. Raise ValueError also if ``position`` is
    neither an int inside the sequence nor an integer tensor [batch].
    """
    ring = ring_of(group)
    _check("gather_token", x, ring, layout, length, position)
    held = gathered_length(tuple(x.shape), layout, ranks_of(ring), length)
    wanted = position if isinstance(position, Tensor) else torch.tensor([token_position(position, held)], device=x.device)
    mine = positions(layout, ranks_of(ring), held, rank_in(ring)).to(x.device)
    here = ((mine == wanted[:, None]) & (mine < held)).expand(x.shape[0], -1)
    token = x[torch.arange(x.shape[0], device=x.device), here.int().argmax(1)]
    token = torch.where(here.any(1).view(-1, *[1] * (token.ndim - 1)), token, torch.zeros_like(token))
    if ranks_of(ring) == 1:
        return token
    tokens: Any = AllGather.apply(token[:, None], ring)  # 0 from a rank that does not hold the token of a row
    return tokens.sum(1, dtype=None if tokens.is_floating_point() else torch.int64).to(x.dtype)


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: dist.ProcessGroup) -> Tensor:
        ctx.ring = ring.group_name  # a reference to the group would keep it alive as long as the graph
        return all_gather(x, ring)

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None]:
        ring, wide = group_of(ctx.ring), dwhole.to(torch.promote_types(dwhole.dtype, torch.float32))
        dshards = torch.cat(wide.chunk(ranks_of(ring), 1))
        dx = dshards.new_empty(dwhole.shape[0], dwhole.shape[1] // ranks_of(ring), *dwhole.shape[2:])
        collectives.reduce_scatter_single(dx, dshards, group=ring)
        return dx.to(dwhole.dtype), None


def _check(call: str, x: Any, ring: Group, layout: str | BalancedLayout, length: int | None, position: int | Tensor = -1) -> None:
    def check() -> None:
        check_along(x, isinstance(x, Tensor), "a torch.Tensor", 0)
        if is_dtensor(x):
            raise ValueError("x is a DTensor: pass this rank's shard, x.to_local(), in layout order")
        held = gathered_length(tuple(x.shape), layout, ranks_of(ring), length)
        if isinstance(position, Tensor):
            if position.shape != x.shape[:1] or position.dtype.is_floating_point or position.dtype == torch.bool:
                shape = f"{position.dtype} {list(position.shape)}"
                raise ValueError(f"position must be integers [{x.shape[0]}], one for each row, or an int, got {shape}")
        else:
            token_position(position, held)

    tensor = isinstance(x, Tensor)
    kind = (tuple(x.shape), str(x.dtype), x.device.type) if tensor else ((), "", "cpu")
    alike = ("x_shape", kind[0]), ("dtype", kind[1]), ("layout", layout), ("length", length)
    where = () if isinstance(position, Tensor) else (("position", position),)
    agree_on(AgreedCall(call, kind[2], (*alike, *where)), ring, check)
