"""Folding of a shard into the folded batches of each pattern of dilated attention, and the reverse, with gradients.

``fold_shard`` copies an array into the folded batches of the core's ``variants/dilated.py`` by padding, slicing and reshaping,
without gather or scatter. ``mix`` puts the results (out_i, lse_i) of all patterns i back into the shard's token order, and sums
the out_i with softmax weights alpha_i, in at least float32 and in the patterns' order, as the gradients of an array are summed:

    lse = log sum_i exp(lse_i)          alpha_i = exp(lse_i - lse)          out = sum_i alpha_i out_i
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.variants.dilated import HeadSelection, Place

from ..attend.tiles import accumulation_dtype

Places = tuple[Place, ...]


def fold_shard(x: jax.Array, places: Places, rank: jax.Array) -> tuple[jax.Array, ...]:
    """Fold a shard ``x`` [b s h d] into folded batches [b * head_groups, slots, heads, d] of each pattern. Differentiable."""
    return _fold(x, rank, places)


def mix(outs: Sequence[jax.Array], lses: Sequence[jax.Array], queries: Places, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unfold the patterns' results and sum them, weighted by exp(lse_i - lse): out [b s h e], lse [b s h]. Differentiable.

    A token that sees no key in any pattern has out 0, lse -inf and zero gradients.
    """
    return _mix((tuple(outs), tuple(lses)), rank, queries)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _fold(x: jax.Array, rank: jax.Array, places: Places) -> tuple[jax.Array, ...]:
    return tuple(fold(x, place, rank) for place in places)


def _fold_backward(places: Places, residuals: Any, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
    rank, like = residuals
    wide, heads = accumulation_dtype(like.dtype), like.shape[1]
    parts = (unfold(x.astype(wide), place, rank, heads) for x, place in zip(gradients, places, strict=True))
    return reduce(jnp.add, parts).astype(like.dtype), None


_fold.defvjp(lambda x, rank, places: (_fold(x, rank, places), (rank, jnp.zeros((0, x.shape[2]), x.dtype))), _fold_backward)

Results = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mix(results: Results, rank: jax.Array, places: Places) -> tuple[jax.Array, jax.Array]:
    (outs, lses), heads = results, _heads(places)
    lses = [lse[..., None] for lse in lses]
    top, total = _sums(lses, rank, places)
    parts = (
        unfold(_weight(lse_i, (top, total), place, rank) * out.astype(top.dtype), place, rank, heads)
        for out, lse_i, place in zip(outs, lses, places, strict=True)
    )
    return reduce(jnp.add, parts).astype(outs[0].dtype), (top + jnp.log(total))[..., 0]


def _mix_backward(places: Places, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Results, None]:
    """Return the gradients dout_i and dlse_i of each pattern i, 0 for queries that see no key in pattern i.

    With the module's alpha_i: dout_i = alpha_i dout and dlse_i = alpha_i (<dout, out_i> - <dout, out> + dlse), where <,> sums
    over the features.
    """
    (outs, lses), rank = residuals
    dout, dlse = cotangents
    lses, heads = [lse[..., None] for lse in lses], _heads(places)
    sums = _sums(lses, rank, places)
    alphas = [_weight(lse_i, sums, place, rank) for lse_i, place in zip(lses, places, strict=True)]
    douts = [  # a query that sees no key may have NaN as its cotangent
        jnp.where(lse_i > -jnp.inf, alpha * fold(dout, place, rank).astype(alpha.dtype), 0)
        for lse_i, alpha, place in zip(lses, alphas, places, strict=True)
    ]
    dots = [(dout_i * out.astype(dout_i.dtype)).sum(-1, keepdims=True) for dout_i, out in zip(douts, outs, strict=True)]
    delta = reduce(jnp.add, (unfold(dot, place, rank, heads) for dot, place in zip(dots, places, strict=True)))
    rest = dlse[..., None] - delta
    dlses = tuple(
        jnp.where(lse_i > -jnp.inf, dot + alpha * fold(rest, place, rank), 0)[..., 0]
        for lse_i, dot, alpha, place in zip(lses, dots, alphas, places, strict=True)
    )
    return (tuple(x.astype(out.dtype) for x, out in zip(douts, outs, strict=True)), dlses), None


_mix.defvjp(lambda results, rank, places: (_mix(results, rank, places), (results, rank)), _mix_backward)


def _heads(places: Places) -> int:
    """Return the number of heads in the shard: the end (exclusive) of the range of heads that the last pattern uses."""
    return places[-1][1].end


def _sums(lses: Sequence[jax.Array], rank: jax.Array, places: Places) -> tuple[jax.Array, jax.Array]:
    """Return for each query the maximum of lse_i over the patterns i, and sum_i exp(lse_i - maximum), both [b s h 1]."""
    heads = _heads(places)
    top = reduce(jnp.maximum, (unfold(x, place, rank, heads, -jnp.inf) for x, place in zip(lses, places, strict=True)))
    parts = (_exp(x, fold(top, place, rank)) for x, place in zip(lses, places, strict=True))
    return top, reduce(jnp.add, (unfold(x, place, rank, heads) for x, place in zip(parts, places, strict=True)))


def _exp(lse_i: jax.Array, top: jax.Array) -> jax.Array:
    return jnp.where(lse_i > -jnp.inf, jnp.exp(lse_i - top), 0)


def _weight(lse_i: jax.Array, sums: tuple[jax.Array, jax.Array], place: Place, rank: jax.Array) -> jax.Array:
    """Return alpha_i = exp(lse_i - lse), or 0 for queries that see no key in pattern i.

    ``sums``: (maximum of lse_i, sum of exp(lse_i - maximum)): for huge scores the rounding of lse would change the weight.
    """
    top, total = (fold(x, place, rank) for x in sums)
    return _exp(lse_i, top) / jnp.where(total > 0, total, 1)


def fold(x: jax.Array, place: Place, rank: jax.Array) -> jax.Array:
    """Fold a shard ``x`` [b s h d] into folded batches [b * head_groups, slots, heads, d]; empty slots and padded heads are 0."""
    batches, selection = place
    x = x[:, :, selection.first : selection.end]
    if selection.repeat > 1:
        x = jnp.repeat(x, selection.repeat, 2)[:, :, selection.skip : selection.skip + selection.selected]
    x = _heads_padded(x, 0, selection.padded - selection.selected)
    if batches.padded:
        most = batches.dilation - 1
        x = jnp.pad(x, ((0, 0), (most, batches.spanned - batches.local), (0, 0), (0, 0)))
        x = lax.dynamic_slice_in_dim(x, most - batches.front(rank), batches.spanned, 1)
    b, _, _, d = x.shape
    x = x.reshape(b, batches.slots, batches.dilation, selection.padded, d)[:, :, : batches.head_groups]
    n = selection.padded // selection.spread
    x = x.reshape(b, batches.slots, selection.spread, selection.together, n, selection.spread, d)
    x = jnp.where(_diagonal(selection), x, 0).sum(5, dtype=x.dtype) if selection.spread > 1 else x[:, :, :, :, :, 0]
    return x.transpose(0, 2, 3, 1, 4, 5).reshape(b * batches.head_groups, batches.slots, n, d)


def unfold(x: jax.Array, place: Place, rank: jax.Array, heads: int, fill: float = 0) -> jax.Array:
    """Invert ``fold``: return the shard [b s heads d], with ``fill`` where no folded batch has a token; copies are summed."""
    batches, selection = place
    rows, slots, n, d = x.shape
    x = x.reshape(rows // batches.head_groups, selection.spread, selection.together, slots, n, d).transpose(0, 3, 1, 2, 4, 5)[
        :, :, :, :, :, None
    ]
    if selection.spread > 1:
        x = jnp.where(_diagonal(selection), x, fill)
    x = x.reshape(x.shape[0], slots, batches.head_groups, selection.padded, d)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, batches.dilation - batches.head_groups), (0, 0), (0, 0)), constant_values=fill)
    x = x.reshape(x.shape[0], batches.spanned, selection.padded, d)
    if batches.padded:
        x = lax.dynamic_slice_in_dim(x, batches.front(rank), batches.local, 1)
    x = x[:, :, : selection.selected]
    if selection.repeat > 1:
        x = _heads_padded(
            x, selection.skip, (selection.end - selection.first) * selection.repeat - selection.skip - selection.selected
        )
        x = x.reshape(*x.shape[:2], selection.end - selection.first, selection.repeat, d).sum(3)
    return _heads_padded(x, selection.first, heads - selection.end, fill)


def _heads_padded(x: jax.Array, before: int, behind: int, fill: float = 0) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (before, behind), (0, 0)), constant_values=fill) if before or behind else x


def _diagonal(selection: HeadSelection) -> jax.Array:
    """Return a bool mask for arrays [b slots spread together heads spread d], True if the two spread indices are equal."""
    return jnp.eye(selection.spread, dtype=bool)[:, None, None, :, None]
