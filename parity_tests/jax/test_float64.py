"""Flax layers in float64 compute everything in it: angles, sinks and slopes too, over any ring."""

from __future__ import annotations

import jax
import pytest

from ..support.float64 import check, layer
from ..support.selection import first
from .models import run_layer


@pytest.mark.parametrize(("ranks", "name"), first([(2, "everything"), (2, "rotary"), (1, "everything"), (4, "everything")], 0, 2))
def test_a_layer_of_float64_is_exact_over_a_ring(ranks, name):
    weights, x, dout, arguments = layer(name)
    with jax.enable_x64(True):
        got = run_layer(weights, x, dout, ranks, arguments)
    check(got, name)
