"""Conversion of MultiheadAttention's attn_mask to a band or to extents, with a key mask if needed.

A band allows an interval of lags (query position - key position). Its limits are the least and the greatest lag of the visible
pairs; it may lack one or both of them. The extent of a query is the tightest interval around the keys that it sees. A key mask
hides keys from all queries. The result is the first of the following that equals the mask: a band, a band with a key mask,
extents, extents with a key mask. Any other mask is refused, and so is a mask that differs between the heads of a batch row.

The functions of ``functional/`` use ``data/dense_masks.py`` of the core instead, which finds key extents too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn_core.data.dense_masks import HEADS_DIFFER
from ring_attn_core.masks import causal, full
from ring_attn_core.runs import Band


class MaskArguments(NamedTuple):
    """A mask as a band, extents and a key mask: a query sees a key if all three allow the pair. ``mask_arguments`` returns them
    for the global sequences in natural order; ``MultiheadBase`` takes this rank's shards."""

    band: Band
    extents: Tensor | None = None
    """``extents=`` of ring_attention, int [batch, queries, 2]."""
    key_mask: Tensor | None = None
    """``key_mask=`` of ring_attention, bool [batch, keys]."""

    @property
    def arrays(self) -> dict[str, Tensor]:
        """Return the extents and the key mask by field name, without those that are None."""
        return {name: x for name, x in (("extents", self.extents), ("key_mask", self.key_mask)) if x is not None}


def visible_of(name: str, mask: Tensor) -> Tensor:
    """Convert a torch mask, bool (True: hidden) or additive (0: visible), to bool, True for visible. ``name``: for errors. Under
    torch.compile the values of an additive mask are unknown and not checked."""
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


def mask_arguments(visible: Tensor, is_causal: bool = False) -> MaskArguments:
    """Convert ``visible``, bool [batch, queries, keys] in natural order, to a band if one fits, else to extents.

    Try in this order: a band, a band with a key mask, extents, extents with a key mask. The bands are the tightest one around
    the visible pairs, with both, one or none of its limits. The extents are the tightest interval of keys for each query. The
    key mask hides each key that no query sees. If none of these equals ``visible``, no combination of a band, extents and a
    key mask does. Under torch.compile, where values are unknown, ``is_causal`` is required and believed.
    """
    _, queries, keys = visible.shape
    if is_causal:
        if not torch.compiler.is_compiling() and not (visible == torch.ones_like(visible).tril()).all():
            raise ValueError("is_causal=True beside an attn_mask that is not causal: leave out the one that is not meant")
        return MaskArguments(causal())
    if torch.compiler.is_compiling():
        raise ValueError("torch.compile hides what attn_mask holds: pass is_causal=True, beside it or in place of it")
    if not visible.numel():
        return MaskArguments(full())
    counts, row = visible.sum(-1), torch.arange(queries, device=visible.device)
    first, end = visible.byte().argmax(-1), keys - visible.flip(-1).byte().argmax(-1)
    lo = torch.where(counts > 0, row - end + 1, queries).min()
    hi = torch.where(counts > 0, row - first, -keys).max()
    lo, hi = torch.minimum(lo, hi), hi  # if no query sees a key, any band fits

    everybody, used = visible.new_ones(visible.shape[0], keys), visible.any(1)
    begins = {True: torch.zeros_like(row), False: (row - hi).clamp(0, keys)}
    ends = {True: torch.full_like(row, keys), False: (row - lo + 1).clamp(0, keys)}
    tried = [(open_lo, open_hi, hidden) for hidden in (False, True) for open_lo in (True, False) for open_hi in (True, False)]
    fits = [(_between(used if h else everybody, begins[b], ends[a]) == counts).all() for a, b, h in tried]
    fits += [(_between(mask, first, end)[counts > 0] == counts[counts > 0]).all() for mask in (everybody, used)]
    lowest, highest, *fit = torch.stack([lo, hi, *(x.long() for x in fits)]).tolist()  # one host sync
    for fitting, (open_lo, open_hi, hidden) in zip(fit, tried, strict=False):
        if fitting:
            band = Band(None if open_lo else lowest, None if open_hi else highest)
            return MaskArguments(band, key_mask=used if hidden else None)
    if not fit[-1]:
        raise ValueError(
            "attn_mask is neither a band (causal, a sliding window) nor one interval of keys for each query, apart from keys "
            "hidden from all queries: pass such a mask, and padding as key_padding_mask"
        )
    extents = torch.stack([first, end], -1).masked_fill((counts == 0)[..., None], 0)
    return MaskArguments(full(), extents, None if fit[-2] else used)


def _between(mask: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Return the number of keys, int [batch, queries], at which ``mask`` [batch, keys] is True in ``first`` .. ``end - 1``."""
    before = torch.nn.functional.pad(mask.long().cumsum(-1), (1, 0))
    rows = (mask.shape[0], first.shape[-1])
    return before.gather(1, end.expand(rows)) - before.gather(1, first.expand(rows)) if mask.numel() else before[:, :0]
