"""Checks on all ranks that the shards of a RingTransformer fit together, before any tensor is sent.

In a causal model an extent that begins after its query shows that a ``layout`` is wrong or missing. Key extents, positions and
path lengths are those of the same prefix trees; ``data/tree_shards.py`` of the core explains how these are compared. Only a CPU
checks every call. Other devices check the first of a batch's shape, because they wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_attn_core.data.layout_check import check_extents_match_layout
from ring_attn_core.data.tree_shards import check_one_tree, spans_of
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.validation import is_integer

from ..ring.agreement import AgreedCall, agree, exchange, same_error, was_compared
from ..ring.groups import ranks_of, ring_of
from .ring import LayerRing

TREE = "RingTransformer with a tree"


def agree_on_places(ids: Tensor, extents: Any, length: Any, layout: BalancedLayout | None, ring: LayerRing) -> None:
    """Raise ValueError on all ranks if a nonempty extent begins after its query."""
    group, shape = ring_of(ring.group), tuple(ids.shape)
    call = AgreedCall("RingTransformer with extents", ids.device.type, (("ids_shape", shape),))
    if call.device != "cpu" and was_compared(call, group):
        return
    fits = isinstance(extents, Tensor) and tuple(extents.shape) == (*shape, 2) and _can_check(shape, layout, [extents])
    with same_error(group):
        tokens = ring.positions(shape[1], layout=layout).numpy() if fits else None
        if tokens is not None and tokens.shape == shape[1:]:
            inside = tokens < length if is_integer(length) else slice(None)
            check_extents_match_layout(extents.cpu().numpy()[:, inside], tokens[inside], tree=False)
    agree(call, group, again=True)


def agree_on_tree(
    ids: Tensor, key_extents: Any, positions: Any, longest: Any, layout: BalancedLayout | None, ring: LayerRing
) -> None:
    """Raise ValueError on all ranks if the ranks' shards do not belong to the same prefix trees."""
    group, shape = ring_of(ring.group), tuple(ids.shape)
    call = AgreedCall(TREE, ids.device.type, (("ids_shape", shape),))
    if call.device != "cpu" and was_compared(call, group):
        return
    arrays = [x for x in (key_extents, positions) if x is not None]
    fits = is_integer(longest) and longest > 0 and all(isinstance(x, Tensor) for x in arrays)
    fits = fits and tuple(key_extents.shape) == (*shape, 2) and _can_check(shape, layout, arrays)
    fits = fits and (positions is None or tuple(positions.shape) in (shape, shape[1:]))
    spans, counted = None, positions is not None
    with same_error(group):
        if fits:
            tokens = ring.positions(shape[1], layout=layout)
            places = (tokens if positions is None else positions).expand(shape)
            spans = spans_of(key_extents.cpu().numpy(), places.cpu().numpy(), tokens.numpy())
    arguments = {"call": TREE, "ids_shape": shape, "longest_path": longest, "positions given": counted}
    arguments["layout"] = None if layout is None else str(layout)
    shards: list[Any] = [spans] if group is None or ranks_of(group) == 1 else exchange(arguments, spans, group)
    if None not in shards:
        check_one_tree(shards, longest, counted)
    if call.device != "cpu":
        agree(call, group)


def _can_check(shape: tuple[int, ...], layout: Any, arrays: list[Tensor]) -> bool:
    """Return False if arrays are not integers, or if a balanced layout has other shards: later checks refuse them."""
    integers = not any(x.is_floating_point() or x.is_complex() or x.dtype == torch.bool for x in arrays)
    return integers and (not isinstance(layout, BalancedLayout) or layout.seq_local == shape[1])
