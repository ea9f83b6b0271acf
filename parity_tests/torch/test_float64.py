"""Torch layers in float64 compute everything in it: angles, sinks and slopes too, over any ring."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring_attn_torch import RingAttention, RotaryEmbedding

from ..support.float64 import CLOSE, LAYERS, ROTARIES, check, layer, turned
from .models import layer_on_rank


@pytest.mark.parametrize("rotary", ROTARIES, ids=lambda rotary: str(rotary.scaling))
def test_angles_of_float64_are_float64(rotary):
    x, where, exact = turned(rotary)
    got = RotaryEmbedding(16, rotary.base, rotary.scaling)(torch.from_numpy(x), torch.from_numpy(where))
    np.testing.assert_allclose(got, exact, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layer_of_float64_is_exact_over_a_ring(gloo, ranks, name):
    for got in gloo(ranks, layer_on_rank, *layer(name)):
        check(got, name)


@pytest.mark.parametrize("kept", ["float64", "float32", "bfloat16"])
def test_sinks_are_kept_in_float32_at_least(kept):
    sinks = RingAttention(16, 2, sinks=True, param_dtype=kept).sinks
    assert sinks is not None
    assert sinks.dtype == (torch.float64 if kept == "float64" else torch.float32)
