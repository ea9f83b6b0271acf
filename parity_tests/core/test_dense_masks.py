"""Dense masks become bands and intervals that show exactly the same, or nothing at all."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn_core import Band, causal, full, sliding_window
from ring_attn_core.data import dense_masks
from ring_attn_core.data.dense_masks import Hulls, both, dense_mask_arguments
from ring_attn_core.reference.oracle import visible

from ..support.functional import FITTING, drawn_mask

seeds, sizes = st.integers(0, 2**32 - 1), st.integers(0, 9)


def shown(parts, queries: int, keys: int) -> np.ndarray:
    """Return the visible pairs of the parts, as the oracle reads them."""
    return visible(parts.band, range(queries), range(keys), parts.extents, parts.key_mask, parts.key_extents)


@pytest.mark.parametrize("kind", FITTING)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=seeds, queries=st.integers(1, 12), keys=st.integers(1, 12))
def test_a_mask_of_intervals_is_shown_exactly(kind, seed, queries, keys):
    mask = drawn_mask(random.Random(seed), kind, 3, 1, queries, keys)[:, 0]
    parts = dense_mask_arguments(mask)
    assert parts is not None
    np.testing.assert_array_equal(np.broadcast_to(shown(parts, queries, keys), mask.shape), mask)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(seed=seeds, rows=st.integers(0, 2), queries=sizes, keys=sizes, share=st.sampled_from((0.1, 0.5, 0.9)))
def test_a_mask_of_noise_is_shown_exactly_or_refused(seed, rows, queries, keys, share):
    mask = np.random.default_rng(seed).random((rows, queries, keys)) < share
    parts, (row, column) = dense_mask_arguments(mask), (hull(mask), hull(mask.swapaxes(1, 2)).swapaxes(1, 2))
    assert (parts is None) == bool(((row & column) != mask).any())
    if parts is not None:
        np.testing.assert_array_equal(np.broadcast_to(shown(parts, queries, keys), mask.shape), mask)


def hull(mask: np.ndarray) -> np.ndarray:
    """True from the first to the last true entry of the last dimension, by brute force."""
    return (np.maximum.accumulate(mask, -1) & np.maximum.accumulate(mask[..., ::-1], -1)[..., ::-1]) if mask.size else mask


@pytest.mark.parametrize(
    "band", [full(), causal(), causal(2), causal(-3), sliding_window(2), sliding_window(1, 1, 1), Band(hi=2)]
)
def test_a_band_stays_a_band(band):
    parts = dense_mask_arguments(visible(band, range(9), range(11)))
    assert parts is not None
    assert parts == (band, None, None, None)


def test_the_drawings_on_top_of_the_file_are_true():
    drawn = [line.split() for line in str(dense_masks.__doc__).splitlines() if line.strip() and set(line.strip()) <= set("#. ")]
    masks = np.array([[[mark == "#" for mark in line[i]] for line in drawn] for i in range(4)])
    got = [dense_mask_arguments(mask[None]) for mask in masks]
    assert [parts and [x is not None for x in parts] for parts in got] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        None,
    ]


def test_a_mask_read_in_blocks_is_the_same(monkeypatch):
    mask = np.concatenate([drawn_mask(random.Random(i), "rows and columns", 1, 1, 13, 9)[:, 0] for i in range(2)])
    whole, hulls = dense_mask_arguments(mask), Hulls(2, 13, 9)
    for start in range(0, 13, 4):
        hulls.add(start, mask[:, start : start + 4])
    monkeypatch.setattr(dense_masks, "BLOCK", 20)
    for got in (hulls.parts(), dense_mask_arguments(mask)):
        assert got is not None
        assert whole is not None
        for ours, theirs in zip(got, whole, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_two_bands_meet():
    assert both(sliding_window(3, 2), causal()) == sliding_window(3)
    assert both(full(), causal(1)) == both(causal(1), full()) == causal(1)
