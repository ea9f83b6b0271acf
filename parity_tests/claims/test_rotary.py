"""Rotary embeddings: every shard's, far positions, half precision and float64."""

from __future__ import annotations

import numpy as np
import pytest

from ring_attn_core import LAYOUTS

from ..support.float64 import CLOSE, LAYERS, ROTARIES, check, layer, turned
from ..support.models import LENGTH, rotate
from ..support.published import SCALINGS
from ..support.selection import first, grid, in_each


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_of_every_shard_is_the_shard_of_the_rotated_whole(framework, layout):
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, 8)).astype(np.float32)
    shards = np.split(np.asarray(framework.to_layout(framework.array(x), layout, 4)), 4, 1)
    rotary = framework.RotaryEmbedding(8)
    places = [framework.positions(layout, 4, LENGTH, rank) for rank in range(4)]
    together = np.concatenate([rotary(framework.array(x), where) for x, where in zip(shards, places, strict=True)], 1)
    whole = framework.from_layout(framework.array(together), layout, 4, LENGTH)
    np.testing.assert_allclose(whole, rotate(x.astype(np.float64), np.arange(LENGTH)), atol=2e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_rotary_is_right_at_a_million_tokens_and_for_positions_of_every_row(framework, name):
    head_dim, rotary, _ = SCALINGS[name]
    where = np.stack([np.arange(LENGTH), 2**20 - 1 - 513 * np.arange(LENGTH)]).astype(np.int32)
    x, exact = turned(rotary, where, head_dim)
    turn = framework.RotaryEmbedding(head_dim, rotary.base, rotary.scaling)
    np.testing.assert_allclose(turn(framework.array(x.astype(np.float32)), framework.array(where)), exact, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_rotary_takes_positions_of_every_integer_dtype(framework, dtype):
    where = np.linspace(0, min(np.iinfo(dtype).max, 2**20), LENGTH).astype(dtype)
    x = np.random.default_rng(0).standard_normal((1, LENGTH, 2, 16)).astype(np.float32)
    got = framework.RotaryEmbedding(16)(framework.array(x), framework.array(where))
    np.testing.assert_allclose(got, rotate(x.astype(np.float64), where.astype(np.int64)), atol=1e-5)


def test_rotary_of_bfloat16_does_not_round_positions(framework):
    where = np.arange(250, 250 + LENGTH, dtype=np.int32)
    x = framework.array(np.random.default_rng(0).standard_normal((1, LENGTH, 2, 16)), "bfloat16")
    rotary = framework.RotaryEmbedding(16)
    got = (rotary.bfloat16() if framework.name == "torch" else rotary)(x, framework.array(where))
    assert got.dtype == x.dtype
    got, exact = map(framework.numpy, (got, framework.array(rotate(framework.numpy(x), where), "bfloat16")))
    assert (got == exact).mean() > 0.99
    np.testing.assert_allclose(got, exact, atol=2**-6)


@pytest.mark.parametrize("rotary", ROTARIES, ids=lambda rotary: str(rotary.scaling))
def test_angles_of_float64_are_float64(framework, rotary):
    where = 83 * np.arange(LENGTH)
    x, exact = turned(rotary, where)
    with framework.x64():
        got = framework.RotaryEmbedding(16, rotary.base, rotary.scaling)(framework.array(x), framework.array(where))
    np.testing.assert_allclose(got, exact, rtol=CLOSE, atol=CLOSE)


IN_JAX = [(2, "everything"), (2, "rotary"), (1, "everything"), (4, "everything")]


@in_each("ranks,name", jax=first(IN_JAX, 0, 2), torch=grid([1, 2, 4], LAYERS))
def test_a_layer_of_float64_is_exact_over_a_ring(framework, ranks, name):
    *arrays, arguments = layer(name)
    with framework.x64():
        check(framework.layer(*arrays, ranks, arguments), name)


@pytest.mark.parametrize("kept", ["float64", "float32", "bfloat16"])
def test_sinks_are_kept_in_float32_at_least(framework, kept):
    with framework.x64():
        sinks = framework.make("RingAttention", 16, 2, sinks=True, param_dtype=kept).sinks
        assert str(sinks.dtype).removeprefix("torch.") == ("float64" if kept == "float64" else "float32")
