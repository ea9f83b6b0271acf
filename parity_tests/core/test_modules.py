"""Tests of values that layers derive from their arguments: slopes of any number of heads, and the masks of windows."""

from __future__ import annotations

import numpy as np
import pytest

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.model.alibi import alibi_slopes


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [(1, [8]), (8, [1, 2, 3, 4, 5, 6, 7, 8]), (3, [4, 8, 2]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5])],
)
def test_alibi_slopes_are_the_papers(heads, exponents):
    expected = 2.0 ** -np.array(exponents)
    np.testing.assert_array_equal(alibi_slopes(heads), expected)
    np.testing.assert_array_equal(alibi_slopes(heads, np.arange(heads, dtype=np.float64)), expected)


@pytest.mark.parametrize("mask", [full(), causal(), causal(2), sliding_window(3, after=1), sliding_window(1, offset=6)], ids=str)
@pytest.mark.parametrize("window", [0, 2, 5])
def test_a_band_within_a_window_is_the_intersection(mask, window):
    for lag in range(-9, 10):
        assert mask.within(window).sees(lag, 0) == (mask.sees(lag, 0) and abs(lag) <= window)
