"""Conversion of a dense mask [queries, keys] to the arguments of ring attention: extents and a key mask.

No mask becomes a band here, as in ``data/dense_masks.py`` of the core: a band must be known at compile time, and jit hides the
values of a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ring_attn_core.plan.balanced_layout import BalancedLayout

from ..data.extents import whole
from ..data.layout import from_layout


class MaskArguments(NamedTuple):
    """A dense mask as extents and a key mask, global and in layout order. A query sees a key if both allow the pair."""

    extents: jax.Array | None
    """``extents=`` of ring_attention, int32 [batch, queries, 2]; None if the mask is empty or has one row for all queries."""
    key_mask: jax.Array
    """``key_mask=`` of ring_attention, bool [batch, keys]."""
    fits: jax.Array | None = None
    """bool [batch, queries], True if extents and key mask express the query's visible keys exactly; None: all True."""


def visible_of(mask: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    """Convert a flax mask, nonzero where a query sees a key, to bool [rows, heads, queries, keys]; sizes of 1 stand for all.

    ``scores``: the shape (batch..., heads, queries, keys) that the mask must broadcast to.
    """
    shape = (*[1] * (len(scores) - mask.ndim), *mask.shape)
    if len(shape) != len(scores) or any(n not in (1, m) for n, m in zip(shape, scores, strict=True)):
        raise ValueError(f"mask must broadcast against {list(scores)}, batch, heads, queries and keys, got {list(mask.shape)}")
    kept = (*shape[-3:-1], scores[-1])
    return jnp.broadcast_to(mask.reshape(shape) != 0, (*scores[:-3], *kept)).reshape(-1, *kept)


def mask_arguments(visible: jax.Array, layout: str | BalancedLayout, ranks: int) -> MaskArguments:
    """Convert ``visible``, bool [rows, heads, queries, keys] in layout order, to extents and a key mask.

    An extent is the tightest interval around a query's keys in the first head; None if all queries share a row. The key mask
    hides keys that no query of any head sees.
    """
    visible = whole(whole(visible, 2), 3)
    key_mask = visible.any((1, 2))
    fits = None if visible.shape[1] == 1 else (visible == visible[:, :1]).all((1, 3))
    visible = visible[:, 0]
    if visible.shape[1] == 1 or not visible.size:
        return MaskArguments(None, key_mask, fits)
    keys = visible.shape[2]
    natural = lambda x, dim: x if layout == "contiguous" else from_layout(x, layout, ranks, keys, dim)
    visible, used = natural(visible, 2), natural(key_mask, 1)
    counts = visible.sum(-1, dtype=jnp.int32)
    first, end = (jnp.argmax(x, -1).astype(jnp.int32) for x in (visible, visible[..., ::-1]))
    first, end = (jnp.where(counts > 0, x, 0) for x in (first, keys - end))
    before = jnp.pad(jnp.cumsum(used, -1, dtype=jnp.int32), ((0, 0), (1, 0)))
    between = jnp.take_along_axis(before, end, 1) - jnp.take_along_axis(before, first, 1)
    one = between == counts
    return MaskArguments(jnp.stack([first, end], -1), key_mask, one if fits is None else one & fits)
