"""A shard as the lanes of its patterns and back, with gradients: pure rearrangement, no gather and no scatter.

``Lanes`` in the core says where a token goes. ``folded`` makes the lanes of an array, ``mixed`` brings the results of all
patterns together, each weighted by its softmax's denominator Z_i = exp(lse_i):

    lse = log sum_i exp(lse_i)          alpha_i = exp(lse_i - lse)          out = sum_i alpha_i out_i

Gradients of an array are summed over patterns in float32, in the order of the patterns, and so are the outs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn_core.variants.dilated import Lanes, Part

Place = tuple[Lanes, Part]
Places = tuple[Place, ...]


def folded(x: Tensor, places: Places, rank: int) -> tuple[Tensor, ...]:
    """A shard [b s h d] -> for each place its lanes [b * classes, slots, heads of a class, d], differentiable."""
    return Fold.apply(x, places, rank)


def mixed(outs: list[Tensor], lses: list[Tensor], lanes: tuple[Lanes, ...], rank: int) -> tuple[Tensor, Tensor]:
    """The outs and lses of the patterns' lanes -> out [b s h e] in their dtype, lse [b s h]; differentiable.

    A token that no pattern shows anything: out 0, lse -inf, zero gradients.
    """
    return Mix.apply(tuple((each, each.of_queries) for each in lanes), rank, *outs, *lses)


class Fold(torch.autograd.Function):
    """``folded``."""

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
    """``mixed``. Saved are the lanes and their sums; out is not, since the backward makes <dout, out> of the lanes."""

    @staticmethod
    def forward(ctx: Any, places: Places, rank: int, *results: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = results[: len(places)], results[len(places) :]
        last = places[-1][0]
        shape = outs[0].shape[0] // places[0][0].classes, last.local, last.first + last.heads
        top = lses[0].new_full((*shape, 1), -math.inf)
        total, out = torch.zeros_like(top), lses[0].new_zeros((*shape, outs[0].shape[-1]))
        for lse_i, place in zip(lses, places, strict=True):
            put(top, lse_i[..., None], place, rank, _raise)
        for lse_i, place in zip(lses, places, strict=True):
            put(total, _exp(lse_i[..., None], fold(top, place, rank)), place, rank, Tensor.add_)
        sums = torch.cat((top, total), -1)
        for out_i, lse_i, place in zip(outs, lses, places, strict=True):
            put(out, out_i, place, rank, _weighted(_weight(lse_i, fold(sums, place, rank))))
        ctx.places, ctx.rank = places, rank
        ctx.save_for_backward(*results, sums)
        return out.to(outs[0].dtype), (top + total.log())[..., 0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        """dout_i = alpha_i dout, dlse_i = alpha_i (<dout, out_i> - <dout, out> + dlse), 0 where a pattern sees nothing."""
        places, rank = ctx.places, ctx.rank
        *results, sums = ctx.saved_tensors
        outs, lses = results[: len(places)], results[len(places) :]
        dlse = dlse[..., None]
        delta = torch.zeros_like(sums[..., :1])
        douts, dots, alphas = [], [], []
        for out_i, lse_i, place in zip(outs, lses, places, strict=True):
            seen = (lse_i > -math.inf)[..., None]  # what sees nothing may have NaN for a cotangent
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


def _raise(spots: Tensor, lane: Tensor) -> None:
    spots.copy_(torch.maximum(spots, lane))


def _weighted(alpha: Tensor) -> Callable[[Tensor, Tensor], object]:
    """What adds lanes times ``alpha`` in one pass."""
    return lambda spots, lane: spots.addcmul_(alpha.reshape(*spots.shape[:-1], 1), lane)


def _exp(lse_i: Tensor, top: Tensor) -> Tensor:
    return torch.where(lse_i > -math.inf, torch.exp(lse_i - top), 0)


def _weight(lse_i: Tensor, sums: Tensor) -> Tensor:
    """alpha_i, 0 where a pattern sees nothing. ``sums``: the largest lse_i, and all Z_i over the Z of that one.

    lse itself would not do: where scores are huge, its rounding changes the weights.
    """
    top, total = sums.split(1, -1)
    return _exp(lse_i[..., None], top) / torch.where(total > 0, total, 1)


def fold(x: Tensor, place: Place, rank: int) -> Tensor:
    """A shard [b s h d] -> its lanes [b * classes, slots, heads of a class, d]; slots and heads that there are not: 0."""
    lanes, part = place
    spots = _spots(_padded(_chosen(x, part), lanes, part, rank), lanes, part)
    return spots.flatten(0, 2)  # which also knows how many lanes there are where they hold no slot


def put(total: Tensor, lane: Tensor, place: Place, rank: int, combine: Callable[[Tensor, Tensor], object]) -> None:
    """Let ``combine(spots, lane)`` change, in place, the tokens of a shard [b s h d] that lanes hold.

    Where ``fold`` repeats a head, what ``combine`` makes of zeros is added up.
    """
    lanes, part = place
    if part.repeat > 1:
        total = total[:, :, part.first : part.end]
        repeated = total.new_zeros(*total.shape[:2], total.shape[2] * part.repeat, total.shape[3])
        kept = part._replace(first=0, end=part.kept, repeat=1)
        put(repeated[:, :, part.skip : part.skip + part.kept], lane, (lanes, kept), rank, combine)
        total += repeated.unflatten(2, (-1, part.repeat)).sum(3)
        return
    own = total[:, :, part.first : part.end]
    padded = _padded(own, lanes, part, rank)
    spots = _spots(padded, lanes, part)
    combine(spots, lane.reshape(spots.shape))
    if padded is not own:
        own.copy_(padded[:, lanes.front(rank) : lanes.front(rank) + lanes.local, : part.kept])


def _chosen(x: Tensor, part: Part) -> Tensor:
    """The heads that a pattern uses, each as often as it does."""
    x = x[:, :, part.first : part.end]
    if part.repeat == 1:
        return x
    return x[:, :, :, None].expand(-1, -1, -1, part.repeat, -1).flatten(2, 3)[:, :, part.skip : part.skip + part.kept]


def _padded(x: Tensor, lanes: Lanes, part: Part, rank: int) -> Tensor:
    """``x`` with the tokens that the slots span and the heads that the classes have; the same object where these are its own."""
    front = lanes.front(rank)
    behind, heads = lanes.spanned - front - lanes.local, part.padded - part.kept
    return F.pad(x, (0, 0, 0, heads, front, behind)) if front or behind or heads else x


def _spots(padded: Tensor, lanes: Lanes, part: Part) -> Tensor:
    """The view [b, spread, together, slots, heads of a class, d] of what lanes hold of [b, tokens, heads, d]."""
    tokens = padded.unflatten(1, (lanes.slots, lanes.dilation))[:, :, : lanes.classes]
    spots = tokens.unflatten(2, (part.spread, part.together)).unflatten(4, (-1, part.spread))
    return spots.diagonal(0, 2, 5).permute(0, 5, 2, 1, 3, 4)
