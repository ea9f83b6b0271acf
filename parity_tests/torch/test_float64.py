"""Torch layers in float64 compute everything in it: angles, sinks and slopes too, over any ring."""

from __future__ import annotations

import pytest

from ..support.float64 import LAYERS, check, layer
from .models import layer_on_rank


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layer_of_float64_is_exact_over_a_ring(gloo, ranks, name):
    for got in gloo(ranks, layer_on_rank, *layer(name)):
        check(got, name)
