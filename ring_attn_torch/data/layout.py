"""Permutation of global arrays into layout order and back, and the position of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ring_attn_core.layouts import check_pad_value, check_padded, check_rank, check_ranks, find_layout, padded_local
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.problem.checks import check_along, check_number

if TYPE_CHECKING:
    from jaxtyping import Int


def to_layout(x: Tensor, layout: str | BalancedLayout, ranks: int, dim: int = 1, pad_value: Any = 0) -> Tensor:
    """Pad and permute a global array so that its ``ranks`` equal chunks along ``dim`` are the shards of rank 0, 1, ...

    ``x`` has its tokens in natural order along ``dim``. ``layout``: a name, or the ``.layout`` of a shard of ``shard_batch(...,
    layout="balanced")``. The end of ``x`` is padded with ``pad_value``. A named layout pads to the smallest length that it can
    split equally, a balanced layout to its own size. Raise ValueError if the layout is unknown or was made for another length, or
    if another argument is invalid, such as a ``pad_value`` of 0.5 for an integer tensor.

    To continue a sequence, only ``"striped"`` shards without padding may be concatenated with the shards of new tokens. A zigzag
    or contiguous shard with tokens appended silently gives wrong attention, since positions depend on the layout and the length.
    Call ``to_layout`` again on the whole longer array.
    """
    check_along(x, isinstance(x, Tensor), "a torch.Tensor", dim)
    check_number("pad_value", pad_value)
    check_pad_value(pad_value, _bounds(x.dtype))
    order = _order(layout, ranks, x.shape[dim])
    padding = list(x.shape)
    padding[dim] = len(order) - x.shape[dim]
    padded = torch.cat([x, x.new_full(padding, pad_value)], dim)
    return padded.index_select(dim, order.to(x.device))


def from_layout(x: Tensor, layout: str | BalancedLayout, ranks: int, length: int, dim: int = 1) -> Tensor:
    """Invert :func:`to_layout`: return the tokens in natural order, cut at ``length``.

    Raise ValueError if the size of ``x`` along ``dim`` is not the size to which ``to_layout`` pads ``length`` tokens, or if the
    layout, ``dim`` or ``ranks`` is invalid.
    """
    check_along(x, isinstance(x, Tensor), "a torch.Tensor", dim)
    order = _order(layout, ranks, length)
    check_padded(x.shape[dim], len(order), f"along dim {dim} for length={length} over {ranks} ranks in {layout}")
    return x.index_select(dim, order.argsort()[:length].to(x.device))


def positions(layout: str | BalancedLayout, ranks: int, length: int, rank: int) -> Int[Tensor, " seq_local"]:
    """Return the global position of each token in a rank's shard, int32 [seq_local].

    Padding has positions >= length. The result holds for all batch rows, while the positions of ``shard_batch``, [batch,
    seq_local], may differ between rows. Positions depend on the layout and ``length``: if the sequence grows, the old tokens of a
    zigzag or contiguous shard get other positions. So append new tokens only to a striped shard without padding (see
    :func:`to_layout`).

    Raise ValueError if ``rank`` is outside 0 .. ranks - 1, or if the layout is unknown or does not fit ``ranks`` or ``length``.
    """
    check_rank(rank, ranks)
    if isinstance(layout, BalancedLayout):
        layout.check(ranks, length)
        held = (torch.arange(start, start + length, dtype=torch.int32) for start, length in layout.runs[rank])
        return torch.cat([torch.empty(0, dtype=torch.int32), *held])
    runs = find_layout(layout)(rank, ranks, padded_local(layout, ranks, length))
    return torch.cat([run.start + run.stride * torch.arange(run.length, dtype=torch.int32) for run in runs])


def _bounds(dtype: torch.dtype) -> tuple[int, int] | None:
    if dtype.is_floating_point or dtype.is_complex:
        return None
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _order(layout: str | BalancedLayout, ranks: int, length: int) -> Tensor:
    """Return the global position of each token in the array that ``to_layout`` returns, int32 [padded length]."""
    check_ranks(ranks)
    return torch.cat([positions(layout, ranks, length, rank) for rank in range(ranks)])
