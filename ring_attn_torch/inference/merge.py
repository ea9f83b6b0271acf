"""What ranks have found over their own keys, merged into what all keys together would have given."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.problem.checks import check_own_pair

from ..attend.decode import merged
from ..ring.agreement import Call, agree_on
from ..ring.groups import Group, constant, group_name, group_of, ranks_of


def merge_ring(pair: tuple[Tensor, Tensor], *, group: dist.ProcessGroup | DeviceMesh | None = None) -> tuple[Tensor, Tensor]:
    """The (out, lse) over the keys of all ranks, of the pair (out [b s h e], lse [b s h]) that each has over its own.

    What :func:`merge` makes of a list with the pairs of all ranks, on every rank and with the same bits: one collective carries
    out and lse, in float32 (float64), packed in one array, and they are merged in the order of the ranks. The lse is a natural
    logarithm; a rank that saw nothing has out 0 and lse -inf, and changes nothing.

    ``group``: the ring; None is the default group. Returns float32 (float64), whatever dtype out has.

    For inference: not differentiable. Raises ValueError, the same on every rank and before anything is sent, for what is no such
    pair, for one that wants a gradient, and where ranks hold other shapes or dtypes, if they make this call for the first time.
    """
    ring = ring_of(group)

    def check() -> None:
        check_own_pair(pair, lambda x: isinstance(x, Tensor), "a torch.Tensor")
        refuse_gradients("merge_ring", pair)

    arrays = [x for x in pair if isinstance(x, Tensor)] if isinstance(pair, tuple | list) else []
    alike = tuple((name, (tuple(x.shape), str(x.dtype))) for name, x in zip(("out", "lse"), arrays, strict=False))
    agree_on(Call("merge_ring", arrays[0].device.type if arrays else "cpu", alike), ring, check)
    out, lse = pair
    wide = torch.promote_types(torch.promote_types(out.dtype, lse.dtype), torch.float32)
    packed = torch.cat([out.to(wide), lse.to(wide)[..., None]], -1)
    return merged(gather_pairs(packed, ring), None)


def gather_pairs(pair: Tensor, ring: Group) -> Tensor:
    """The packed pairs [ranks, ...] of all ranks, in their order."""
    if ranks_of(ring) == 1:
        return pair[None]
    pair = pair.contiguous()
    pairs = pair.new_empty(ranks_of(ring), *pair.shape)
    dist.all_gather_into_tensor(pairs.view(-1), pair.view(-1), group=ring)
    return pairs


def refuse_gradients(call: str, tensors: tuple[Tensor | None, ...]) -> None:
    """ValueError where a gradient is wanted of what has none."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            f"{call} is for inference and has no gradient, and an array that it is given requires one: call it under "
            "torch.no_grad(), or pass x.detach(). For training there are ring_attention, attend_block and merge"
        )


@constant
def ring_of(group: dist.ProcessGroup | DeviceMesh | None) -> Group:
    """The process group of a ring, None for a ring of one without torch.distributed."""
    return group_of(group_name(group))
