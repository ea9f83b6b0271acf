"""Whole arrays to shards and back, and what goes with the tokens of a rank: positions and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ring_attn_core.layouts import check_rank, named, padded_local
from ring_attn_core.masks import full
from ring_attn_core.plan import RingPlan

if TYPE_CHECKING:
    from jaxtyping import Int


class Shard(NamedTuple):
    """What ``shard_batch`` returns; every array is in layout order along dimension 1."""

    ids: Tensor
    """int [batch, tokens]: token ids, 0 at padding."""
    labels: Tensor
    """int [batch, tokens]: the next token's id, ``ignore_index`` where there is none."""
    positions: Tensor
    """int32 [batch, tokens]: global positions, for rotary embeddings."""
    extents: Tensor | None
    """int32 [batch, tokens, 2] or None: what each query may see."""
    key_mask: Tensor | None
    """bool [batch, tokens] or None: which keys may be attended."""
    length: int
    """The true global number of tokens, for ``ring_attention(..., length=length)``."""


def to_layout(x: Tensor, layout: str, ranks: int, dim: int = 1, pad_value: Any = 0) -> Tensor:
    """Pad and permute a whole array so that its ``ranks`` equal chunks along ``dim`` are the shards of rank 0, 1, ...

    ``x`` has its tokens in natural order along ``dim``; they are padded at the end with ``pad_value`` to the least number that
    the layout can cut equally. Raises ValueError for an unknown layout.
    """
    order = _order(layout, ranks, x.shape[dim])
    padding = list(x.shape)
    padding[dim] = len(order) - x.shape[dim]
    padded = torch.cat([x, x.new_full(padding, pad_value)], dim)
    return padded.index_select(dim, torch.tensor(order, dtype=torch.long, device=x.device))


def from_layout(x: Tensor, layout: str, ranks: int, length: int, dim: int = 1) -> Tensor:
    """The inverse of :func:`to_layout`: the shards' tokens in natural order, padding cut off at ``length``.

    Raises ValueError where ``x`` is not as long as ``to_layout`` makes ``length`` tokens.
    """
    order = _order(layout, ranks, length)
    if x.shape[dim] != len(order):
        raise ValueError(
            f"from_layout expects {len(order)} tokens along dim {dim} for length={length} over {ranks} ranks in {layout}, "
            f"got {x.shape[dim]}: pass the length that to_layout was given"
        )
    inverse = sorted(range(len(order)), key=order.__getitem__)[:length]
    return x.index_select(dim, torch.tensor(inverse, dtype=torch.long, device=x.device))


def positions(layout: str, ranks: int, length: int, rank: int) -> Int[Tensor, " seq_local"]:
    """int32 [seq_local]: the global position of every token of a rank, in shard order; padding has positions >= length.

    Raises ValueError for a rank that is none of the ranks.
    """
    check_rank(rank, ranks)
    runs = named(layout)(rank, ranks, padded_local(layout, ranks, length))
    return torch.cat([run.start + run.stride * torch.arange(run.length, dtype=torch.int32) for run in runs])


def shard_batch(
    ids: Int[Tensor, "batch length"],
    layout: str,
    ranks: int,
    rank: int | None = None,
    *,
    labels: Int[Tensor, "batch length"] | None = None,
    documents: Any = None,
    key_mask: Any = None,
    ignore_index: int = -100,
) -> Shard:
    """Token ids [batch, length] of whole sequences -> the shard of ``rank``, or all shards in layout order where it is None.

    ``labels`` [batch, length]: what each token should predict; None shifts ``ids`` by one *before* sharding, so that the label
    of a shard's last token is right. Padding gets ``ignore_index``. Raises ValueError for shapes that do not fit.
    """
    if documents is not None or key_mask is not None:
        raise NotImplementedError("documents and key_mask of shard_batch do not work yet; leave them at None")
    check_rank(rank, ranks)
    if ids.ndim != 2:
        raise ValueError(f"ids must be [batch, length] of whole sequences, got shape {list(ids.shape)}")
    ids, labels = ids.long(), None if labels is None else labels.long()  # ignore_index has no place in unsigned ids
    if labels is None:
        labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], ignore_index)], 1)
    if labels.shape != ids.shape:
        raise ValueError(f"labels must have the shape of ids {list(ids.shape)}, got {list(labels.shape)}")
    length = ids.shape[1]
    ids = to_layout(ids, layout, ranks)
    labels = to_layout(labels, layout, ranks, pad_value=ignore_index)
    where = torch.cat([positions(layout, ranks, length, r) for r in range(ranks)]).to(ids.device).expand_as(ids)
    chunk = lambda x: x if rank is None else x.chunk(ranks, 1)[rank]
    return Shard(chunk(ids), chunk(labels), chunk(where), None, None, length)


def _plan(layout: str, ranks: int, length: int) -> RingPlan:
    return RingPlan(layout, full(), ranks, padded_local(layout, ranks, length), length=length)


def _order(layout: str, ranks: int, length: int) -> list[int]:
    """The natural position of every token of the padded array in layout order."""
    plan = _plan(layout, ranks, length)
    return [position for rank in range(ranks) for position in plan.positions(rank)]
