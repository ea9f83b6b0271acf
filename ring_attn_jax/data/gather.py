"""All-gather shards into global sequences in natural order, or gather one token of each row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.layouts import gathered_length, token_position
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.problem.checks import check_along

from ..axes import axis_size
from ..call.traced import TracedLayout
from .layout import from_layout, positions


def gather(
    x: jax.Array,
    *,
    axis_name: str = "seq",
    layout: str | BalancedLayout | TracedLayout = "zigzag",
    length: int | None = None,
) -> jax.Array:
    """Gather the shards [batch, tokens, ...] of all ranks into [batch, length, ...] in natural order, on every rank.

    Call inside ``jax.shard_map`` over ``axis_name``; for global arrays in layout order use :func:`from_layout`. ``layout``: a
    name, the ``.layout`` of a shard, or the TracedLayout made from that. ``length``: the global number of tokens without padding.
    None: the number of tokens of all shards or, for a balanced layout, the length of the layout.

    Differentiable: the gradient of a shard is the sum over all ranks of the gradients of the shard's tokens. JAX treats the
    result as replicated. So a loss that every rank computes from the result and returns under ``out_specs=P()`` counts once, not
    once per rank. With ``check_vma=False`` JAX does not track the replication: a gradient computed inside the shard_map is the
    gradient on one device times the number of ranks.

    Raise ValueError if ``x`` cannot be a shard of ``length`` tokens in ``layout``, or outside a shard_map over the axis. Raise
    NotImplementedError if ``axis_name`` is a tuple: a ring has one axis.
    """
    ranks = _ranks("gather", x, axis_name)
    held = gathered_length(x.shape, layout, ranks, length)
    sent = x.astype(jnp.int32) if x.dtype == bool else x
    start = lax.axis_index(axis_name) * x.shape[1]
    placed = lax.dynamic_update_slice_in_dim(
        jnp.zeros((x.shape[0], ranks * x.shape[1], *x.shape[2:]), sent.dtype), sent, start, 1
    )
    return from_layout(lax.psum(placed, axis_name).astype(x.dtype), layout, ranks, held)


def gather_token(
    x: jax.Array,
    position: int | jax.Array = -1,
    *,
    axis_name: str = "seq",
    layout: str | BalancedLayout | TracedLayout = "zigzag",
    length: int | None = None,
) -> jax.Array:
    """Gather one token of each row from the shards [batch, tokens, ...] of all ranks. Return [batch, ...] on every rank.

    ``position``: the global position of the token. An int applies to all rows; a negative int counts from the end, so -1 is the
    last token. An integer array [batch] holds one position per row; a row gets 0 if its position is outside 0 .. length - 1. Each
    rank sends one token per row. For example, the logits of the last token are
    ``gather_token(model(ids, ..., return_hidden=True), length=length) @ model.head_weight.T``.

    ``axis_name``, ``layout``, ``length``, gradient and errors are those of :func:`gather`. Raise ValueError also if ``position``
    is neither an int inside the sequence nor an integer array [batch].
    """
    ranks = _ranks("gather_token", x, axis_name)
    held = gathered_length(x.shape, layout, ranks, length)
    if getattr(position, "shape", ()) or not hasattr(position, "__index__"):
        wanted = _rows(position, x.shape[0])
    else:
        wanted = jnp.full((1,), token_position(position, held), jnp.int32)
    mine = positions(layout, ranks, held, lax.axis_index(axis_name))[None]
    here = jnp.broadcast_to((mine == wanted[:, None]) & (mine < held), x.shape[:2])
    index = jnp.argmax(here, 1).reshape(-1, *[1] * (x.ndim - 1))
    token = jnp.take_along_axis(x, index, 1)[:, 0]
    token = jnp.where(here.any(1).reshape(-1, *[1] * (token.ndim - 1)), token, jnp.zeros((), x.dtype))
    return lax.psum(token.astype(jnp.int32) if x.dtype == bool else token, axis_name).astype(x.dtype)


def _rows(position: Any, batch: int) -> jax.Array:
    if getattr(position, "shape", None) != (batch,) or not jnp.issubdtype(position.dtype, jnp.integer):
        shape = f"{getattr(position, 'dtype', type(position).__name__)} {list(getattr(position, 'shape', ()))}"
        raise ValueError(f"position must be integers [{batch}], one for each row, or an int, got {shape}")
    return position.astype(jnp.int32)


def _ranks(call: str, x: Any, axis_name: Any) -> int:
    check_along(x, hasattr(x, "shape") and hasattr(x, "dtype"), "an array", 0)
    inside = f"call {call} inside jax.shard_map over a mesh with that axis; whole arrays in layout order go back by from_layout"
    return axis_size(axis_name, inside)
