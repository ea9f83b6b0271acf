"""Code shared by the functions of this folder: arguments of the ring, sequence lengths, and shards of global arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.data.dense_masks import DenseMaskArguments
from ring_attn_core.layouts import find_layout
from ring_attn_core.masks import full
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.validation import as_number, in_words

from ..call.signature import ring_attention
from ..ring.agreement import same_error
from ..ring.groups import is_dtensor, rank_in, ranks_of, ring_of

Qkv = tuple[Tensor, Tensor, Tensor]
Arguments = dict[str, Any]


class RingArguments(NamedTuple):
    """The arguments that describe the ring. ``length``, ``kv_length``: global tokens of queries and keys without padding. None:
    all tokens of the q shards; ``kv_length`` is ``length`` if the shards are equally long, else all tokens of the k shards."""

    group: dist.ProcessGroup | DeviceMesh | None
    layout: str
    length: int | None
    kv_length: int | None


class Shards(NamedTuple):
    """The sharding of a call's arrays. ``local``: queries and keys in one shard. ``lengths``: their global numbers."""

    rank: int
    ranks: int
    layout: str
    local: tuple[int, int]
    lengths: tuple[int, int]

    def own(self, x: Any, side: int, device: torch.device) -> Tensor:
        """Return this rank's shard of a global array [rows, length, ...], zero-padded. ``side``: 0 for queries, 1 for keys."""
        x = torch.as_tensor(x, device=device)
        runs = find_layout(self.layout)(self.rank, self.ranks, self.local[side])
        at = torch.cat([torch.arange(run.start, run.start + run.stride * run.length, run.stride, device=device) for run in runs])
        padding = x.new_zeros(x.shape[0], self.ranks * self.local[side] - x.shape[1], *x.shape[2:])
        return torch.cat([x, padding], 1).index_select(1, at)

    @property
    def arguments(self) -> Arguments:
        return {"layout": self.layout, "length": self.lengths[0], "kv_length": self.lengths[1]}

    def mask(self, parts: DenseMaskArguments, batch: int, device: torch.device) -> Arguments:
        whole = {"extents": (parts.extents, 0), "key_extents": (parts.key_extents, 1), "key_mask": (parts.key_mask, 1)}
        own = {name: self.own(x, side, device) for name, (x, side) in whole.items() if x is not None}
        return {"mask": parts.band} | {name: x.expand(batch, *x.shape[1:]) for name, x in own.items()}


def shards_of(q: Tensor, k: Tensor, ring: RingArguments) -> Shards:
    """Return the ``Shards`` of a call on q and k [batch, tokens, heads, head_dim]; on one rank "contiguous", never padded."""
    group = ring_of(ring.group)
    ranks = ranks_of(group)
    find_layout(ring.layout)
    layout = ring.layout if ranks > 1 else "contiguous"  # for one rank all layouts are the same, and this one is never padded
    plan = RingPlan(layout, full(), ranks, q.shape[1], k.shape[1], ring.length, ring.kv_length)  # type: ignore[arg-type]
    return Shards(rank_in(group), ranks, layout, (q.shape[1], k.shape[1]), (plan.length, plan.kv_length))


def attend(prepare: Callable[[], tuple[Qkv, Arguments]], ring: RingArguments) -> Any:
    """Call ``ring_attention`` on q, k, v and arguments from ``prepare``. If it fails on a rank, all ranks raise the error."""
    with same_error(ring_of(ring.group)):
        (q, k, v), arguments = prepare()
    return ring_attention(q, k, v, group=ring.group, **arguments)


def check_dims(arrays: dict[str, Any], *axes: str) -> None:
    for name, x in arrays.items():
        if not isinstance(x, Tensor) or is_dtensor(x) or x.is_nested:
            raise ValueError(f"{name} must be a dense torch.Tensor [{', '.join(axes)}], this rank's shard, got {in_words(x)}")
        if x.ndim != len(axes):
            raise ValueError(f"{name} must be [{', '.join(axes)}], got shape {list(x.shape)}")


def dropout_of(dropout_p: float, dropout_seed: int | Tensor | None) -> Arguments:
    dropout_p = as_number(dropout_p)
    if not isinstance(dropout_p, float | int):
        raise ValueError(f"dropout_p must be a number, got {in_words(dropout_p)}: pass a float")
    if not dropout_p:
        return {}
    if dropout_seed is None:
        raise ValueError(
            f"dropout_p={dropout_p} needs dropout_seed=, an integer that is the same on every rank and another at every step: "
            "pass it, or dropout_p=0.0 to drop nothing"
        )
    return {"dropout_rate": dropout_p, "dropout_seed": dropout_seed}
