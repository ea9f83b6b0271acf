"""The merge of attention over sharded keys: one all-gather turns each rank's (out, lse) into the (out, lse) over all keys."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.problem.checks import check_own_pair

from ..attend.slots import merge
from ..attend.tiles import accumulation_dtype
from ..ring import collectives
from ..ring.agreement import AgreedCall, agree_on
from ..ring.groups import Group, ranks_of, ring_of


def merge_ring(pair: tuple[Tensor, Tensor], *, group: dist.ProcessGroup | DeviceMesh | None = None) -> tuple[Tensor, Tensor]:
    """Merge each rank's (out [b s h e], lse [b s h]) over its own keys into (out, lse) over all keys.

    The result equals that of :func:`merge` on the pairs of all ranks up to rounding. One all-gather exchanges the pairs, each
    packed in one array of the result's dtype. Every rank merges them in rank order, so all ranks get the same bits. The lse is a
    natural logarithm. If a query sees no key of a rank, that rank passes out 0 and lse -inf for the query, and does not change
    the result.

    ``group``: the ring; None is the default group. The result is float64 if out or lse is float64, else float32.

    For inference: not differentiable. Raise ValueError, before any tensor is sent, if ``pair`` is not (out, lse) in floating
    dtypes, or if lse's shape is not ``out.shape[:-1]``. Also raise ValueError if ``pair`` requires a gradient while gradients are
    enabled, or if shapes or dtypes differ between ranks. At the first call with given shapes and dtypes the ranks compare them,
    and all raise the same error. In later calls, and under torch.compile, a rank with an error raises alone.
    """
    ring = ring_of(group)

    def check() -> None:
        check_own_pair(pair, lambda x: isinstance(x, Tensor), "a torch.Tensor")
        refuse_gradients("merge_ring", pair)

    arrays = [x for x in pair if isinstance(x, Tensor)] if isinstance(pair, tuple | list) else []
    alike = tuple((name, (tuple(x.shape), str(x.dtype))) for name, x in zip(("out", "lse"), arrays, strict=False))
    agree_on(AgreedCall("merge_ring", arrays[0].device.type if arrays else "cpu", alike), ring, check)
    out, lse = pair
    wide = torch.promote_types(torch.promote_types(out.dtype, lse.dtype), torch.float32)
    packed = torch.cat([out.to(wide), lse.to(wide)[..., None]], -1)
    return merge(gather_pairs(packed, ring), None)


def gather_pairs(pair: Tensor, ring: Group) -> Tensor:
    """All-gather the ranks' packed (out, lse) arrays, in rank order: [...] -> [ranks, ...]."""
    if ranks_of(ring) == 1:
        return pair[None]
    pair = pair.contiguous()
    pairs = pair.new_empty(ranks_of(ring), *pair.shape)
    collectives.all_gather_single(pairs.view(-1), pair.view(-1), group=ring)
    return pairs


def sum_over_ranks(hidden: Tensor, ring: Group) -> Tensor:
    """Return the sum of ``hidden`` [batch, ...] over the ranks. Each token is nonzero on at most one rank."""
    if ranks_of(ring) == 1:
        return hidden
    wide = hidden.to(accumulation_dtype(hidden.dtype))
    dist.all_reduce(wide, group=ring)
    return wide.to(hidden.dtype)


def refuse_gradients(call: str, tensors: tuple[Tensor | None, ...]) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            f"{call} is for inference and has no gradient, and an array that it is given requires one: call it under "
            "torch.no_grad(), or pass x.detach(). For training there are ring_attention, attend_block and merge"
        )
