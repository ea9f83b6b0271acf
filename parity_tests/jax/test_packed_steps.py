"""Ten steps of optax on packed rows with segment ids, by the function that docs/other_trainers.md has for MaxText."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ring_attn_jax import document_extents, from_layout, loss, sharded_ring_attention, to_layout

from ..support.models import Arrays, apart
from .ring import mesh_of

pytestmark = pytest.mark.exhaustive
VOCAB, DIM, HEADS, KV_HEADS, LENGTH = 31, 24, 4, 2, 53
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 2, 2, 2]], [9, 20, 19, 5], axis=1).astype(np.int32)  # 0 is padding


def over_a_ring(ranks: int, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    extents = document_extents(jnp.where(segments == 0, -1, segments))
    shards = [to_layout(x, "zigzag", ranks) for x in (q, k, v, extents)]
    where = {"mesh": mesh_of(ranks), "layout": "zigzag", "length": LENGTH}
    return from_layout(sharded_ring_attention(*shards[:3], extents=shards[3], **where), "zigzag", ranks, LENGTH)


def alone(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    mask = (segments[:, :, None] == segments[:, None])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)


class Decoder(nnx.Module):
    """Two layers of attention and a head."""

    def __init__(self, attend: Callable[..., jax.Array]) -> None:
        rngs = nnx.Rngs(0)
        width = DIM + 2 * DIM // HEADS * KV_HEADS
        self.embed, self.head = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)
        self.qkv = nnx.List(nnx.Linear(DIM, width, rngs=rngs) for _ in range(2))
        self.out = nnx.List(nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(2))
        self.attend = attend

    def __call__(self, ids: jax.Array, segments: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            heads = qkv(jnp.tanh(x)).reshape(*ids.shape, -1, DIM // HEADS)
            q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], 2)
            x = x + out(self.attend(q, k, v, segments).reshape(x.shape))
        return self.head(x)


def steps(attend: Callable[..., jax.Array]) -> tuple[list[float], list[Arrays]]:
    """The losses and the gradients."""
    model = Decoder(attend)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3, eps=1e-4), wrt=nnx.Param)
    segments = jnp.asarray(SEGMENTS)
    ends = jnp.roll(segments, -1, 1) != segments

    @nnx.jit
    def step(model: Decoder, optimizer: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
        labels = jnp.where(ends | (segments == 0), -100, jnp.roll(ids, -1, 1))
        value, gradients = nnx.value_and_grad(lambda model: loss(model(ids, segments), labels, axis_name=None))(model)
        optimizer.update(model, gradients)
        return value, gradients

    losses, every = [], []
    for seed in range(10):
        ids = np.random.default_rng(seed).integers(0, VOCAB, SEGMENTS.shape)
        value, gradients = step(model, optimizer, jnp.asarray(ids, jnp.int32))
        losses.append(float(value))
        every.append({jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(gradients)})
    return losses, every


def test_ten_steps_with_segment_ids_on_four_devices_are_those_of_dense_masks_on_one():
    losses, gradients = steps(alone)
    got, got_gradients = steps(partial(over_a_ring, 4))
    assert np.abs(np.divide(got, losses) - 1).max() < 1e-5
    assert max(map(apart, got_gradients, gradients)) < 1e-5
