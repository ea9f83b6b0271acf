"""Flax layers in float64 compute everything in it: angles, sinks and slopes too, over any ring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_jax import RingAttention, RotaryEmbedding

from ..support.float64 import CLOSE, ROTARIES, check, layer, turned
from ..support.selection import first
from .models import run_layer


@pytest.mark.parametrize("rotary", ROTARIES, ids=lambda rotary: str(rotary.scaling))
def test_angles_of_float64_are_float64(rotary):
    x, where, exact = turned(rotary)
    with jax.enable_x64(True):
        got = RotaryEmbedding(16, rotary.base, rotary.scaling)(jnp.asarray(x), jnp.asarray(where))
    np.testing.assert_allclose(got, exact, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(("ranks", "name"), first([(2, "everything"), (2, "rotary"), (1, "everything"), (4, "everything")], 0, 2))
def test_a_layer_of_float64_is_exact_over_a_ring(ranks, name):
    weights, x, dout, arguments = layer(name)
    with jax.enable_x64(True):
        got = run_layer(weights, x, dout, ranks, arguments)
    check(got, name)


@pytest.mark.parametrize("kept", ["float64", "float32", "bfloat16"])
def test_sinks_are_kept_in_float32_at_least(kept):
    with jax.enable_x64(True):
        sinks = RingAttention(16, 2, sinks=True, param_dtype=kept, rngs=nnx.Rngs(0)).sinks
        assert sinks is not None
        assert sinks[...].dtype == (jnp.float64 if kept == "float64" else jnp.float32)
