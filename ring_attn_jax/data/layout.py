"""Permutation of global arrays into layout order and back, and the position of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ring_attn_core.layouts import check_pad_value, check_padded, check_rank, check_ranks, find_layout, padded_local
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.problem.checks import check_along, check_number

from ..call.traced import TracedLayout, every_position
from .extents import whole

if TYPE_CHECKING:
    from jaxtyping import Array, Int


def to_layout(
    x: jax.Array, layout: str | BalancedLayout | TracedLayout, ranks: int, dim: int = 1, pad_value: Any = 0
) -> jax.Array:
    """Pad and permute a global array so that its ``ranks`` equal chunks along ``dim`` are the shards of rank 0, 1, ...

    ``x`` has its tokens in natural order along ``dim``. ``layout``: a name, the ``.layout`` of a shard of ``shard_batch(...,
    layout="balanced")``, or the TracedLayout made from that. The end of ``x`` is padded with ``pad_value``. A named layout pads
    to the smallest length that it can split equally, a balanced layout to its own size. Raise ValueError if the layout is unknown
    or was made for another length, or if another argument is invalid, such as a ``pad_value`` of 0.5 for an integer array.

    To continue a sequence, only ``"striped"`` shards without padding may be concatenated with the shards of new tokens. A zigzag
    or contiguous shard with tokens appended silently gives wrong attention, since positions depend on the layout and the length.
    Call ``to_layout`` again on the whole longer array.
    """
    check_along(x, hasattr(x, "shape") and hasattr(x, "dtype"), "an array", dim)
    check_number("pad_value", pad_value)
    check_pad_value(pad_value, _bounds(x.dtype))
    order = _order(layout, ranks, x.shape[dim])
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, len(order) - x.shape[dim])
    return jnp.take(jnp.pad(whole(x, dim), padding, constant_values=pad_value), order, axis=dim)


def from_layout(x: jax.Array, layout: str | BalancedLayout | TracedLayout, ranks: int, length: int, dim: int = 1) -> jax.Array:
    """Invert :func:`to_layout`: return the tokens in natural order, cut at ``length``.

    Raise ValueError if the size of ``x`` along ``dim`` is not the size to which ``to_layout`` pads ``length`` tokens, or if the
    layout, ``dim`` or ``ranks`` is invalid.
    """
    check_along(x, hasattr(x, "shape") and hasattr(x, "dtype"), "an array", dim)
    order = _order(layout, ranks, length)
    check_padded(x.shape[dim], len(order), f"along dim {dim} for length={length} over {ranks} ranks in {layout}")
    return jnp.take(whole(x, dim), jnp.argsort(order)[:length], axis=dim)


def positions(
    layout: str | BalancedLayout | TracedLayout, ranks: int, length: int, rank: int | jax.Array
) -> Int[Array, " seq_local"]:
    """Return the global position of each token in a rank's shard, int32 [seq_local].

    Padding has positions >= length. The result holds for all batch rows, while the positions of ``shard_batch``, [batch,
    seq_local], may differ between rows. Positions depend on the layout and ``length``: if the sequence grows, the old tokens of a
    zigzag or contiguous shard get other positions. So append new tokens only to a striped shard without padding (see
    :func:`to_layout`).

    ``rank`` may be traced (``lax.axis_index``). Raise ValueError if ``rank`` is an int outside 0 .. ranks - 1, or if the layout
    is unknown or does not fit ``ranks`` or ``length``.
    """
    check_rank(rank, ranks)
    if isinstance(layout, TracedLayout):
        layout.check(ranks, length)
        return layout.table[rank]
    if isinstance(layout, BalancedLayout):
        layout.check(ranks, length)
        return jnp.asarray(every_position(layout))[rank]
    local = padded_local(layout, ranks, length)
    starts = [[run.start for run in find_layout(layout)(r, ranks, local)] for r in range(ranks)]
    slot = find_layout(layout)(0, ranks, local)[0]
    start = jnp.asarray(starts, jnp.int32)[rank]
    return (start[:, None] + slot.stride * jnp.arange(slot.length, dtype=jnp.int32)[None]).reshape(-1)


def _bounds(dtype: jnp.dtype) -> tuple[int, int] | None:
    """Return the least and the greatest value of an integer or bool dtype, or None for other dtypes."""
    if dtype == jnp.bool_:
        return 0, 1
    return (int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)) if jnp.issubdtype(dtype, jnp.integer) else None


def _order(layout: str | BalancedLayout | TracedLayout, ranks: int, length: int) -> jax.Array:
    """Return the global position of each token in the array that ``to_layout`` returns, int32 [padded length]."""
    check_ranks(ranks)
    if isinstance(layout, TracedLayout):
        layout.check(ranks, length)
        return layout.table.reshape(-1)
    if isinstance(layout, BalancedLayout):
        layout.check(ranks, length)
        return jnp.asarray(every_position(layout)).reshape(-1)
    return jnp.concatenate([positions(layout, ranks, length, rank) for rank in range(ranks)])
