"""DilatedRingAttention of both packages from the same weights: same output and gradients, over a ring and on one device."""

from __future__ import annotations

import pytest

from .support.models import assert_near, dilated_arguments, layer_data, layer_weights

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("flax")

from .jax.models import run_layer
from .torch.models import layer_on_rank

pytestmark = pytest.mark.exhaustive


def test_jax_over_a_ring_is_torch_over_a_ring_and_torch_on_one_device(gloo):
    x, dout = layer_data()
    sizes = {"qk_norm": True, "qkv_bias": True}
    weights, arguments = layer_weights(**sizes), dilated_arguments()["softmax"] | sizes
    ring = run_layer(weights, x, dout, 3, arguments)
    for got in gloo(3, layer_on_rank, weights, x, dout, arguments):
        assert_near(got, ring, 1e-5)
    assert_near(layer_on_rank(None, weights, x, dout, arguments), ring, 1e-5)
