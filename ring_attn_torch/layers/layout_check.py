"""A check on all ranks that no nonempty extent of a causal RingTransformer begins after its query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_attn_core.data.layout_check import check_extents_match_layout
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.validation import is_integer

from ..ring.agreement import AgreedCall, agree, agreed, same_error
from ..ring.groups import ring_of
from .ring import LayerRing


def agree_on_places(ids: Tensor, extents: Any, length: Any, layout: BalancedLayout | None, ring: LayerRing) -> None:
    """Raise ValueError on all ranks if a nonempty extent begins after its query: a wrong or missing ``layout`` under a causal
    mask. Only a CPU checks every call: other devices check the first of a batch's shape, because they wait for the device."""
    group, device, shape = ring_of(ring.group), ids.device.type, tuple(ids.shape)
    call = AgreedCall("RingTransformer with extents", device, (("ids_shape", shape),))
    if device != "cpu" and agreed(call, group):
        return
    fits = isinstance(extents, Tensor) and tuple(extents.shape) == (*shape, 2)
    fits = fits and not (extents.is_floating_point() or extents.is_complex() or extents.dtype == torch.bool)
    fits &= not isinstance(layout, BalancedLayout) or layout.seq_local == shape[1]
    with same_error(group):
        tokens = ring.positions(shape[1], layout=layout).numpy() if fits else None
        if tokens is not None and tokens.shape == shape[1:]:
            inside = tokens < length if is_integer(length) else slice(None)
            check_extents_match_layout(extents.cpu().numpy()[:, inside], tokens[inside], of_tree=False)
    agree(call, group, again=True)
