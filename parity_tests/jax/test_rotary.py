"""Rotary embeddings of flax: every shard's, far positions, half precision."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core import LAYOUTS
from ring_attn_jax import from_layout, positions, to_layout
from ring_attn_jax.layers.rotary import RotaryEmbedding

from ..support.models import LENGTH, rotate


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_of_every_shard_is_the_shard_of_the_rotated_whole(layout):
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, 8)).astype(np.float32)
    shards = np.split(np.asarray(to_layout(jnp.asarray(x), layout, 4)), 4, 1)
    rotary = RotaryEmbedding(8)
    turned = [rotary(jnp.asarray(shard), positions(layout, 4, LENGTH, rank)) for rank, shard in enumerate(shards)]
    whole = from_layout(jnp.concatenate(turned, 1), layout, 4, LENGTH)
    np.testing.assert_allclose(whole, rotate(x.astype(np.float64), np.arange(LENGTH)), atol=2e-6)


def test_rotary_is_right_at_a_million_tokens_and_for_positions_of_every_row():
    where = np.stack([np.arange(LENGTH), 2**20 - 1 - 513 * np.arange(LENGTH)]).astype(np.int32)
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, 64)).astype(np.float32)
    turned = RotaryEmbedding(64, base=500000.0)(jnp.asarray(x), jnp.asarray(where))
    for row in range(2):
        exact = rotate(x[row : row + 1].astype(np.float64), where[row], base=500000.0)
        np.testing.assert_allclose(turned[row : row + 1], exact, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_rotary_takes_positions_of_every_integer_dtype(dtype):
    where = np.linspace(0, min(np.iinfo(dtype).max, 2**20), LENGTH).astype(dtype)
    x = np.random.default_rng(0).standard_normal((1, LENGTH, 2, 16)).astype(np.float32)
    turned = RotaryEmbedding(16)(jnp.asarray(x), jnp.asarray(where))
    np.testing.assert_allclose(turned, rotate(x.astype(np.float64), where.astype(np.int64)), atol=1e-5)


def test_rotary_of_bfloat16_does_not_round_positions():
    where = np.arange(250, 250 + LENGTH, dtype=np.int32)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, LENGTH, 2, 16)), jnp.bfloat16)
    turned = RotaryEmbedding(16)(x, jnp.asarray(where))
    assert turned.dtype == jnp.bfloat16
    exact = jnp.asarray(rotate(np.asarray(x, np.float64), where), jnp.bfloat16)
    assert (turned == exact).mean() > 0.99
    np.testing.assert_allclose(np.asarray(turned, np.float32), np.asarray(exact, np.float32), atol=2**-6)
