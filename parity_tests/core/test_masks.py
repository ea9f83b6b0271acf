"""Masks against their pictures and definitions, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ring_attn_core import masks
from ring_attn_core.masks import MASKS, causal, check_mask, full, parse, sliding_window
from ring_attn_core.runs import Band

POSITIONS = range(12)


def pictures() -> dict[str, list[str]]:
    """The matrices drawn on top of masks.py, by the call written above each."""
    lines = [line.strip() for line in (masks.__doc__ or "").splitlines()]
    top = next(i for i, line in enumerate(lines) if line.startswith("full()"))
    calls = re.findall(r"\w+\(.*?\)", lines[top])
    columns = [line.split() for line in lines[top + 1 : top + 7]]
    return {call: [column[i] for column in columns] for i, call in enumerate(calls)}


@pytest.mark.parametrize(("call", "drawn"), pictures().items(), ids=pictures())
def test_a_mask_sees_what_its_picture_shows(call: str, drawn: list[str]):
    band = eval(call, dict(MASKS))
    assert ["".join(".#"[band.sees(i, j)] for j in range(6)) for i in range(6)] == drawn


def test_every_mask_has_a_picture():
    assert {call.partition("(")[0] for call in pictures()} == set(MASKS)


def test_full_sees_every_key():
    assert all(full().sees(i, j) for i in POSITIONS for j in POSITIONS)


@pytest.mark.parametrize("offset", [-20, -3, 0, 4, 20])
def test_causal_sees_the_keys_up_to_the_query_moved_by_offset(offset: int):
    assert all(causal(offset).sees(i, j) == (j <= i + offset) for i in POSITIONS for j in POSITIONS)


@pytest.mark.parametrize("offset", [-5, 0, 7])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 0), (0, 2), (4, 4)])
def test_a_window_sees_before_and_after_keys_around_the_query_moved_by_offset(before: int, after: int, offset: int):
    band = sliding_window(before, after, offset)
    assert all(band.sees(i, j) == (i + offset - before <= j <= i + offset + after) for i in POSITIONS for j in POSITIONS)
    assert sum(band.sees(100, j) for j in range(200)) == before + after + 1


@pytest.mark.parametrize("make", [lambda: sliding_window(-1), lambda: sliding_window(2, after=-1)], ids=["before", "after"])
def test_a_window_with_a_negative_side_is_refused(make):
    with pytest.raises(
        ValueError,
        match=r"needs before >= 0 and after >= 0, got before=.*, after=.*Band\(hi=before\); use offset to shift the window",
    ):
        make()


@pytest.mark.parametrize("window", [(4, 0), [4, np.int64(2)]])
def test_a_window_as_flash_attn_takes_it_is_told_its_name(window: Any):
    with pytest.raises(ValueError, match=r"got \(4, .*\): a window \(before, after\) is sliding_window\(before, after\)"):
        check_mask(window)


@pytest.mark.parametrize("value", [1.5, "3", None, True])
@pytest.mark.parametrize("name", ["before", "after", "offset"])
def test_a_count_of_tokens_that_is_not_an_int_is_refused_by_name(name: str, value):
    with pytest.raises(ValueError, match=f"{name} counts token positions, so it must be an int, got {value!r}"):
        sliding_window(**{"before": 4, name: value})


def test_integers_of_numpy_become_ints_so_that_equal_masks_are_equal():
    counts: Any = np.array([4, 1], np.int32)
    band = sliding_window(*counts)
    assert band == sliding_window(4, 1)
    assert {type(band.lo), type(band.hi)} == {int}


@pytest.mark.parametrize(
    ("text", "band"),
    [
        ("full", full()),
        ("causal", causal()),
        ("causal:-3", causal(-3)),
        ("sliding_window:5", sliding_window(5)),
        ("sliding_window:5:2", sliding_window(5, 2)),
        ("sliding_window:5:2:7", sliding_window(5, 2, 7)),
    ],
)
def test_parse_reads_a_mask_and_its_numbers(text: str, band: Band):
    assert parse(text) == band


@pytest.mark.parametrize("text", ["", "Causal", "full:1", "causal:x", "causal:1:2", "sliding_window", "sliding_window:-1"])
def test_parse_says_how_a_mask_is_written(text: str):
    with pytest.raises(ValueError, match=re.escape(f"cannot read the mask {text!r}: write full, causal[:offset] or")):
        parse(text)
