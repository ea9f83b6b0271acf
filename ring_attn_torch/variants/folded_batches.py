"""Folding of a shard into the folded batches of each pattern of dilated attention, and the reverse, with gradients.

``fold_shard`` copies an array into the folded batches of the core's ``variants/dilated.py`` by padding and strided views, without
gather or scatter. ``mix`` puts the results (out_i, lse_i) of all patterns i back into the token order of the shard, and sums
the out_i with softmax weights alpha_i, in at least float32 and in the patterns' order, as the gradients of an array are summed:

    lse = log sum_i exp(lse_i)          alpha_i = exp(lse_i - lse)          out = sum_i alpha_i out_i
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn_core.variants.dilated import FoldedBatches, HeadSelection, Place

Places = tuple[Place, ...]


def fold_shard(x: Tensor, places: Places, rank: int) -> tuple[Tensor, ...]:
    """Fold a shard ``x`` [b s h d] into folded batches [b * head_groups, slots, heads, d] per pattern, differentiably."""
    return Fold.apply(x, places, rank)


def mix(outs: list[Tensor], lses: list[Tensor], queries: Places, rank: int) -> tuple[Tensor, Tensor]:
    """Unfold the patterns' results and sum them, weighted by exp(lse_i - lse), into out and lse [b s h]; differentiable."""
    return Mix.apply(queries, rank, *outs, *lses)


class Fold(torch.autograd.Function):
    """The autograd function of ``fold_shard``. Its backward adds the gradients of the patterns in at least float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places, rank: int) -> tuple[Tensor, ...]:
        ctx.places, ctx.rank, ctx.shape, ctx.dtype = places, rank, x.shape, x.dtype
        return tuple(fold(x, place, rank) for place in places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        total = gradients[0].new_zeros(ctx.shape, dtype=torch.promote_types(ctx.dtype, torch.float32))
        for gradient, place in zip(gradients, ctx.places, strict=True):
            put(total, gradient, place, ctx.rank, Tensor.add_)
        return total.to(ctx.dtype), None, None


class Mix(torch.autograd.Function):
    """The autograd function of ``mix``, which saves each out_i, lse_i and the weights' normalization, but not out."""

    @staticmethod
    def forward(ctx: Any, places: Places, rank: int, *results: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = results[: len(places)], results[len(places) :]
        last = places[-1][0]
        shape = outs[0].shape[0] // places[0][0].head_groups, last.local, last.first + last.heads
        top = lses[0].new_full((*shape, 1), -math.inf)
        total, out = torch.zeros_like(top), lses[0].new_zeros((*shape, outs[0].shape[-1]))
        for lse_i, place in zip(lses, places, strict=True):
            put(top, lse_i[..., None], place, rank, _raise)
        for lse_i, place in zip(lses, places, strict=True):
            put(total, _exp(lse_i[..., None], fold(top, place, rank)), place, rank, Tensor.add_)
        sums = torch.cat((top, total), -1)
        for out_i, lse_i, place in zip(outs, lses, places, strict=True):
            put(out, out_i, place, rank, _make_weighting(_weight(lse_i, fold(sums, place, rank))))
        ctx.places, ctx.rank = places, rank
        ctx.save_for_backward(*results, sums)
        return out.to(outs[0].dtype), (top + total.log())[..., 0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        """Return dout_i = alpha_i dout and dlse_i = alpha_i (<dout, out_i> - <dout, out> + dlse), 0 for queries without keys."""
        places, rank = ctx.places, ctx.rank
        *results, sums = ctx.saved_tensors
        outs, lses = results[: len(places)], results[len(places) :]
        dlse = dlse[..., None]
        delta = torch.zeros_like(sums[..., :1])
        douts, dots, alphas = [], [], []
        for out_i, lse_i, place in zip(outs, lses, places, strict=True):
            seen = (lse_i > -math.inf)[..., None]  # the gradient of a fully masked query may be NaN
            alpha = _weight(lse_i, fold(sums, place, rank))
            dout_i = torch.where(seen, alpha * fold(dout, place, rank), 0)
            dot = (dout_i * out_i).sum(-1, keepdim=True)
            put(delta, dot, place, rank, Tensor.add_)
            douts.append(dout_i.to(out_i.dtype))
            dots.append(dot)
            alphas.append(alpha)
        dlses = []
        for lse_i, dot, alpha, place in zip(lses, dots, alphas, places, strict=True):
            rest = fold(dlse - delta, place, rank)
            dlses.append(torch.where((lse_i > -math.inf)[..., None], dot + alpha * rest, 0)[..., 0])
        return None, None, *douts, *dlses


def _raise(spots: Tensor, folded: Tensor) -> None:
    spots.copy_(torch.maximum(spots, folded))


def _make_weighting(alpha: Tensor) -> Callable[[Tensor, Tensor], object]:
    """Return a function ``combine(spots, folded)`` for ``put``. It adds ``alpha * folded`` to ``spots`` in place."""
    return lambda spots, folded: spots.addcmul_(alpha.reshape(*spots.shape[:-1], 1), folded)


def _exp(lse_i: Tensor, top: Tensor) -> Tensor:
    return torch.where(lse_i > -math.inf, torch.exp(lse_i - top), 0)


def _weight(lse_i: Tensor, sums: Tensor) -> Tensor:
    """Return alpha_i = exp(lse_i - lse), or 0 for queries that see no key in pattern i. ``sums`` [..., 2]: the maximum of lse_i,
    and the sum of exp(lse_i - maximum), since for huge scores the rounding of lse would change the weight."""
    top, total = sums.split(1, -1)
    return _exp(lse_i[..., None], top) / torch.where(total > 0, total, 1)


def fold(x: Tensor, place: Place, rank: int) -> Tensor:
    """Fold a shard ``x`` [b s h d] into a pattern's [b * head_groups, slots, heads, d]; empty slots and padded heads are 0."""
    batches, selection = place
    spots = _spots(_pad(_choose(x, selection), batches, selection, rank), batches, selection)
    return spots.flatten(0, 2)  # unlike reshape(-1), also correct without slots


def put(total: Tensor, folded: Tensor, place: Place, rank: int, combine: Callable[[Tensor, Tensor], object]) -> None:
    """Update ``total`` [b s h d] by ``combine(spots, folded)`` at folded tokens; copies of a head are summed from zeros."""
    batches, selection = place
    if selection.repeat > 1:
        total = total[:, :, selection.first : selection.end]
        repeated = total.new_zeros(*total.shape[:2], total.shape[2] * selection.repeat, total.shape[3])
        inner = selection._replace(first=0, end=selection.selected, repeat=1)
        put(repeated[:, :, selection.skip : selection.skip + selection.selected], folded, (batches, inner), rank, combine)
        total += repeated.unflatten(2, (-1, selection.repeat)).sum(3)
        return
    own = total[:, :, selection.first : selection.end]
    padded = _pad(own, batches, selection, rank)
    spots = _spots(padded, batches, selection)
    combine(spots, folded.reshape(spots.shape))
    if padded is not own:
        own.copy_(padded[:, batches.front(rank) : batches.front(rank) + batches.local, : selection.selected])


def _choose(x: Tensor, selection: HeadSelection) -> Tensor:
    x = x[:, :, selection.first : selection.end]
    if selection.repeat == 1:
        return x
    copies = x[:, :, :, None].expand(-1, -1, -1, selection.repeat, -1).flatten(2, 3)
    return copies[:, :, selection.skip : selection.skip + selection.selected]


def _pad(x: Tensor, batches: FoldedBatches, selection: HeadSelection, rank: int) -> Tensor:
    """Pad ``x`` [b s h d] with zeros, if needed, to fill the rank's slots and to give each head group equally many heads."""
    front = batches.front(rank)
    behind, heads = batches.spanned - front - batches.local, selection.padded - selection.selected
    return F.pad(x, (0, 0, 0, heads, front, behind)) if front or behind or heads else x


def _spots(padded: Tensor, batches: FoldedBatches, selection: HeadSelection) -> Tensor:
    """Return a view [b, spread, together, slots, heads, d] of the tokens of ``padded`` [b, tokens, h, d] that are folded."""
    tokens = padded.unflatten(1, (batches.slots, batches.dilation))[:, :, : batches.head_groups]
    spots = tokens.unflatten(2, (selection.spread, selection.together)).unflatten(4, (-1, selection.spread))
    return spots.diagonal(0, 2, 5).permute(0, 5, 2, 1, 3, 4)
