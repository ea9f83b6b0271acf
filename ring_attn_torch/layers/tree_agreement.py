"""The check that the shards of all ranks of a model's ring belong to the same prefix trees.

The check comes before any tensor is sent. ``data/trees.py`` of the core defines prefix trees. ``data/tree_shards.py`` explains
how the shards are compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_attn_core.data.tree_shards import check_one_tree, spans_of
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.validation import is_integer

from ..ring.agreement import AgreedCall, agree, agreed, exchange, same_error
from ..ring.groups import ranks_of, ring_of
from .ring import LayerRing

CALL = "RingTransformer with a tree"


def agree_on_tree(
    ids: Tensor, key_extents: Any, positions: Any, longest: Any, layout: BalancedLayout | None, ring: LayerRing
) -> None:
    """Raise ValueError on all ranks if the ranks' shards do not belong to the same prefix trees. Only a CPU compares every call:
    other devices compare the first of a batch's shape, because they wait for the device."""
    group, device, shape = ring_of(ring.group), ids.device.type, tuple(ids.shape)
    call = AgreedCall(CALL, device, (("ids_shape", shape),))
    if device != "cpu" and agreed(call, group):
        return
    arrays = [x for x in (key_extents, positions) if x is not None]
    fits = is_integer(longest) and longest > 0 and all(isinstance(x, Tensor) for x in arrays)
    fits = fits and tuple(key_extents.shape) == (*shape, 2)
    fits = fits and (positions is None or tuple(positions.shape) in (shape, shape[1:]))
    fits = fits and not any(x.is_floating_point() or x.is_complex() or x.dtype == torch.bool for x in arrays)
    fits &= not isinstance(layout, BalancedLayout) or layout.seq_local == shape[1]
    with same_error(group):
        spans = _spans(ids, key_extents, positions, layout, ring) if fits else None
    counted = positions is not None
    arguments = {"call": CALL, "ids_shape": shape, "longest_path": longest, "positions given": counted}
    arguments["layout"] = None if layout is None else str(layout)
    shards: list[Any] = [spans] if group is None or ranks_of(group) == 1 else exchange(arguments, spans, group)
    if None not in shards:
        check_one_tree(shards, longest, counted)
    if device != "cpu":
        agree(call, group)


def _spans(
    ids: Tensor, key_extents: Tensor, positions: Tensor | None, layout: BalancedLayout | None, ring: LayerRing
) -> list[Any]:
    tokens = ring.positions(ids.shape[1], layout=layout)
    places = tokens if positions is None else positions
    return spans_of(key_extents.cpu().numpy(), places.expand(ids.shape).cpu().numpy(), tokens.numpy())
