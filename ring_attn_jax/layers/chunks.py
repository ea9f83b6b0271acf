"""Per-token functions, applied to one chunk of a rank's tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ring_attn_core.model.chunks import even_chunk

from ..axes import explicit_axes, on_auto_axes, on_explicit_axes, sharded_like, vary_alike
from ..sharded import ShardedAxes
from .parts import gather_over


def in_chunks(
    function: Callable[[Any, jax.Array], jax.Array], weights: Any, x: jax.Array, chunk: int, where: ShardedAxes | None
) -> jax.Array:
    """Compute ``function(weights, x)`` for x [b s ...] in chunks of tokens, which the backward recomputes. With ``where`` each
    device chunks its own tokens, and weight gradients are summed over devices once."""

    def on_shard(weights: Any, x: jax.Array) -> jax.Array:
        if x.shape[1] <= chunk:
            return function(weights, x)
        step = jax.checkpoint(function, prevent_cse=False)
        return from_chunks(lax.map(lambda part: step(weights, part), to_chunks(x, chunk)), x.shape[1])

    if where is None:
        return on_shard(weights, x)
    where = where.seen_in(x)
    axes = {*where.batch_axes, where.axis_name}
    spec = PartitionSpec(where.batch_axes or None, where.axis_name)
    inside = lambda weights, x: _beside_explicit_axes(on_shard, weights, x)
    specs = PartitionSpec(), spec
    mapped = jax.shard_map(inside, mesh=where.mesh, in_specs=specs, out_specs=spec, axis_names=axes)
    return mapped(jax.tree.map(lambda weight: gather_over(axes, weight), weights), on_explicit_axes(x, where.mesh, spec))


def _beside_explicit_axes(function: Callable[[Any, jax.Array], jax.Array], weights: Any, x: jax.Array) -> jax.Array:
    """Return ``function(weights, x)``. Inside ``function`` the Explicit mesh axes are Auto, so that XLA shards over them.

    A custom_vjp makes these axes Auto in the backward too: JAX's own would start from zeros on the outer, Explicit mesh.
    """
    if not explicit_axes():
        return function(weights, x)
    forward = on_auto_axes(function, PartitionSpec())

    def backward(inputs: tuple[Any, jax.Array], dy: jax.Array) -> tuple[Any, jax.Array]:
        derived = lambda weights, x, dy: jax.vjp(function, weights, x)[1](dy)
        return on_auto_axes(derived, jax.tree.map(sharded_like, inputs))(*inputs, dy)

    call = jax.custom_vjp(forward)
    call.defvjp(lambda weights, x: (forward(weights, x), (weights, x)), backward)
    return call(*vary_alike((), weights, x))


def to_chunks(x: jax.Array, chunk: int, pad_value: Any = 0) -> jax.Array:
    """Split x [b s ...] into [chunks b c ...] with c <= chunk. Pad the end with ``pad_value``.

    Chunk i holds the tokens i modulo the number of chunks, so that each device that shards tokens computes on every chunk.
    """
    batch, tokens = x.shape[:2]
    length = even_chunk(tokens, chunk)
    chunks = max(-(-tokens // length), 1)
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, length * chunks - tokens)
    padded = jnp.pad(x, padding, constant_values=pad_value) if padding[1][1] else x
    return jnp.moveaxis(padded.reshape(batch, length, chunks, *x.shape[2:]), 2, 0)


def from_chunks(y: jax.Array, tokens: int) -> jax.Array:
    """Undo :func:`to_chunks`: [chunks b c ...] -> [b tokens ...] without padding."""
    y = jnp.moveaxis(y, 0, 2)
    return y.reshape(y.shape[0], y.shape[1] * y.shape[2], *y.shape[3:])[:, :tokens]
