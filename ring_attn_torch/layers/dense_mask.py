"""Conversion of MultiheadAttention's attn_mask to a band or extents, by ``data/dense_masks.py`` of the core.

A mask that differs between the heads of a batch row, or that needs an interval of queries for each key, is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_attn_core.data.dense_masks import HEADS_DIFFER, DenseMaskArguments, dense_mask_arguments
from ring_attn_core.masks import causal


def visible_of(name: str, mask: Tensor) -> Tensor:
    """Return a torch mask as bool, True for visible. Under torch.compile an additive mask's values are not checked."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be bool, True where attention is forbidden, or hold 0 and -inf, got {mask.dtype}")
    visible = mask == 0
    if not torch.compiler.is_compiling() and not (visible | (mask == float("-inf"))).all():
        raise ValueError(
            f"{name} adds numbers other than 0 and -inf to the scores, which would have to travel round the ring: pass a mask of "
            "0 and -inf, or bool; biases by position are alibi_slopes of ring_attention"
        )
    return visible


def visible_pairs(attn_mask: Tensor, batch: int, heads: int) -> Tensor:
    """Return bool [1 or batch, queries, keys]: True where ``attn_mask`` of torch.nn.MultiheadAttention allows attention."""
    if attn_mask.ndim not in (2, 3) or (attn_mask.ndim == 3 and attn_mask.shape[0] != batch * heads):
        raise ValueError(
            f"attn_mask must be [queries, keys] or [batch * heads = {batch * heads}, queries, keys], got {list(attn_mask.shape)}"
        )
    visible = visible_of("attn_mask", attn_mask)
    if attn_mask.ndim == 2:
        return visible[None]
    visible = visible.unflatten(0, (batch, heads))
    if not torch.compiler.is_compiling() and not (visible == visible[:, :1]).all():
        raise ValueError(f"attn_mask {HEADS_DIFFER}")
    return visible[:, 0]


def mask_arguments(visible: Tensor, is_causal: bool = False) -> DenseMaskArguments:
    """Convert ``visible``, bool [batch, queries, keys], to a band or extents, with a key mask. Under torch.compile believe
    ``is_causal``."""
    if is_causal:
        if not torch.compiler.is_compiling() and not (visible == torch.ones_like(visible).tril()).all():
            raise ValueError("is_causal=True beside an attn_mask that is not causal: leave out the one that is not meant")
        return DenseMaskArguments(causal())
    if torch.compiler.is_compiling():
        raise ValueError("torch.compile hides what attn_mask holds: pass is_causal=True, beside it or in place of it")
    parts = dense_mask_arguments(visible.cpu().numpy(), bands_first=True)
    if parts is None or parts.key_extents is not None:
        raise ValueError(
            "attn_mask is neither a band (causal, a sliding window) nor one interval of keys for each query, apart from keys "
            "hidden from all queries: pass such a mask, and padding as key_padding_mask"
        )
    as_tensor = lambda x: None if x is None else torch.from_numpy(x).to(visible.device)
    return parts._replace(extents=as_tensor(parts.extents), key_mask=as_tensor(parts.key_mask))
