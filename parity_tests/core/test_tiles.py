"""Tile ranges against brute force, and tile sizes within what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from ring_attn_core.kernels.tile_sizes import blockwise_tiles, visible_tiles

BANDS = [(lo, hi) for lo in range(-8, 8, 2) for hi in range(-8, 8)]
QUERIES = [(m0, m1) for m0 in range(6) for m1 in range(m0, 7)]


@pytest.mark.pairs
@pytest.mark.parametrize("block_k", [1, 2, 3, 5])
@pytest.mark.parametrize(("begin", "end"), [(0, keys) for keys in range(8)] + [(2, 5), (3, 4), (3, 3), (5, 2), (1, 7)])
def test_the_visible_tiles_are_exactly_those_with_a_visible_key(begin: int, end: int, block_k: int):
    for lo, hi in BANDS:
        for m0, m1 in QUERIES:
            tiles = {j // block_k for j in range(begin, end) if any(lo <= i - j <= hi for i in range(m0, m1))}
            first, last = visible_tiles(m0, m1, lo, hi, begin, end, block_k)
            assert set(range(first, last)) == tiles, (m0, m1, lo, hi)


def test_visible_tiles_of_arrays_are_those_of_their_numbers():
    m0, lo, hi, keys = np.ix_(range(6), range(-7, 7, 3), range(-7, 7), range(8))
    first, end = np.broadcast_arrays(*visible_tiles(m0, m0 + 4, lo, hi, keys // 3, keys, 3))
    for at in np.ndindex(first.shape):
        numbers = visible_tiles(at[0], at[0] + 4, range(-7, 7, 3)[at[1]], range(-7, 7)[at[2]], at[3] // 3, at[3], 3)
        assert (first[at], end[at]) == numbers


@pytest.mark.parametrize("k_slot", [0, 1, 300, 512, 100_000])
@pytest.mark.parametrize("q_slot", [0, 1, 63, 300, 512, 100_000])
@pytest.mark.parametrize("score_rows", [1, 8, 64, 1000, 100_000])
def test_plain_tiles_fit_their_slots_and_keep_the_scores_in_flight_small(score_rows: int, q_slot: int, k_slot: int):
    block_q, block_k = blockwise_tiles(score_rows, q_slot, k_slot)
    assert 1 <= block_q <= max(q_slot, 1)
    assert 1 <= block_k <= max(k_slot, 1)
    assert score_rows * block_q * block_k <= 1 << 24 or block_q <= 64


def test_plain_tiles_are_the_measured_ones_where_nothing_stands_against_it():
    assert blockwise_tiles(8, 8192, 8192) == (256, 256)
    assert blockwise_tiles(32, 8192, 8192) == (128, 128)
