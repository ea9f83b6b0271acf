"""Runs and bands against brute force over every pair of tokens."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn_core.runs import Band, Run, clamp, row

quick = settings(derandomize=True, deadline=None, max_examples=200)
strides = st.integers(1, 5)
starts = st.integers(0, 40)
lengths = st.integers(0, 7)
edges = st.none() | st.integers(-45, 45)
bands = st.builds(Band, edges, edges)


@quick
@given(st.builds(Run, starts, lengths, strides), st.integers(-5, 80))
def test_before_keeps_exactly_the_positions_below_the_end(run: Run, end: int):
    assert list(run.before(end).positions()) == [position for position in run.positions() if position < end]


@quick
@given(starts, lengths, starts, lengths, strides, bands)
def test_a_band_between_runs_sees_the_same_pairs_in_local_indices(
    q0: int, q_len: int, k0: int, k_len: int, stride: int, band: Band
):
    q, k = Run(q0, q_len, stride), Run(k0, k_len, stride)
    local = band.onto(q, k)
    for i, q_pos in enumerate(q.positions()):
        for j, k_pos in enumerate(k.positions()):
            assert local.sees(i, j) == band.sees(q_pos, k_pos)


def test_runs_of_unlike_strides_are_refused():
    with pytest.raises(ValueError, match="a band between runs needs equal strides, got 2 for queries and 3 for keys"):
        Band().onto(Run(0, 4, 2), Run(0, 4, 3))


def test_area_is_the_number_of_pairs_seen():
    ends = [None, *range(-6, 7)]
    for band in (Band(lo, hi) for lo in ends for hi in ends):
        for queries in range(5):
            for keys in range(6):
                assert band.area(queries, keys) == sum(band.sees(i, j) for i in range(queries) for j in range(keys))


@quick
@given(starts, lengths, starts, lengths, strides, bands, st.integers(0, 3), st.integers(0, 3))
def test_a_row_sees_what_the_band_sees_and_stays_within_the_slots(
    q0: int, q_len: int, k0: int, k_len: int, stride: int, band: Band, q_more: int, k_more: int
):
    q_slot, k_slot = q_len + q_more, k_len + k_more
    found = row((11, q_len, q0, stride), (13, k_len, k0, stride), band, q_slot, k_slot, shard=5)
    assert found[2:] == (11, q_len, q0, 13, k_len, k0, stride, 5)
    assert -k_slot <= found.lo <= q_slot
    assert -k_slot <= found.hi <= q_slot
    for i in range(q_len):
        for j in range(k_len):
            assert (found.lo <= i - j <= found.hi) == band.sees(q0 + stride * i, k0 + stride * j)


@pytest.mark.parametrize("band", [Band(), Band(lo=0), Band(hi=3), Band(-2, 9), Band(4, 1)], ids=str)
def test_a_row_of_arrays_is_the_row_of_their_numbers(band: Band):
    rng = np.random.default_rng(0)
    q_runs = rng.integers(0, 50, (6, 1, 4), dtype=np.int32)
    k_runs = rng.integers(0, 50, (1, 7, 4), dtype=np.int32)
    q_runs[..., 3] = k_runs[..., 3] = 3
    found = row(tuple(np.moveaxis(q_runs, -1, 0)), tuple(np.moveaxis(k_runs, -1, 0)), band, 20, 30, shard=2)
    assert found.lo.dtype == found.hi.dtype == np.int32
    fields = [np.broadcast_to(field, (6, 7)) for field in found]
    for a in range(6):
        for b in range(7):
            numbers = row(tuple(q_runs[a, 0].tolist()), tuple(k_runs[0, b].tolist()), band, 20, 30, shard=2)
            assert tuple(int(field[a, b]) for field in fields) == numbers


def test_clamp_is_min_of_max_for_ints_and_arrays():
    xs = range(-9, 10)
    assert [clamp(x, -4, 3) for x in xs] == [min(max(x, -4), 3) for x in xs]
    np.testing.assert_array_equal(clamp(np.arange(-9, 10), -4, 3), np.clip(np.arange(-9, 10), -4, 3))


@pytest.mark.parametrize(
    ("band", "text"),
    [
        (Band(), "every key"),
        (Band(lo=0), "0 <= q_pos - k_pos"),
        (Band(hi=4), "q_pos - k_pos <= 4"),
        (Band(-1, 4), "-1 <= q_pos - k_pos <= 4"),
    ],
)
def test_a_band_prints_as_its_inequality(band: Band, text: str):
    assert str(band) == text


def test_runs_and_bands_are_values():
    assert Run(3, 4) == Run(3, 4, 1)
    assert len({Band(0, None), Band(0), Band(0, 1)}) == 2
    with pytest.raises(FrozenInstanceError):
        Band(0).lo = 1  # type: ignore[misc]
