"""Tests of layouts: the properties of every layout, and the definition of each."""

from __future__ import annotations

import re
from itertools import chain

import pytest

from ring_attn_core import layouts
from ring_attn_core.layouts import LAYOUTS, check_rank, find_layout, padded_local, slots

RANKS = [1, 2, 3, 4, 8]
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_ring = pytest.mark.parametrize("ranks", RANKS)


def held(layout: str, rank: int, ranks: int, seq_local: int) -> list[int]:
    return [position for run in LAYOUTS[layout](rank, ranks, seq_local) for position in run.positions()]


@each_ring
@each_layout
def test_every_position_is_held_by_exactly_one_rank(layout: str, ranks: int):
    for seq_local in (slots(layout) * n for n in (0, 1, 2, 5)):
        positions = [held(layout, rank, ranks, seq_local) for rank in range(ranks)]
        assert [len(shard) for shard in positions] == [seq_local] * ranks
        assert sorted(chain(*positions)) == list(range(ranks * seq_local))


@each_ring
@each_layout
def test_all_runs_have_one_length_and_one_stride(layout: str, ranks: int):
    runs = [run for rank in range(ranks) for run in LAYOUTS[layout](rank, ranks, slots(layout) * 3)]
    assert {(run.length, run.stride) for run in runs} == {(3, runs[0].stride)}
    assert len(runs) == ranks * slots(layout)


@each_layout
def test_a_layout_holds_what_its_picture_shows(layout: str):
    drawn = re.search(rf"^ *{layout} +(rank 0:.*)$", layouts.__doc__ or "", re.MULTILINE)
    assert drawn, f"{layout} is missing in the picture on top of layouts.py"
    shards = [list(map(int, text.split())) for text in re.split(r"rank \d:", drawn[1])[1:]]
    assert shards == [held(layout, rank, 4, 4) for rank in range(4)]


@each_ring
@each_layout
def test_padded_local_is_the_least_that_holds_the_tokens_in_whole_slots(layout: str, ranks: int):
    for length in range(40):
        local = padded_local(layout, ranks, length)
        fitting = [n for n in range(0, length + 2 * slots(layout), slots(layout)) if n * ranks >= length]
        assert local == fitting[0]


def test_zigzag_gives_a_rank_one_chunk_from_each_end():
    for rank in range(4):
        assert held("zigzag", rank, 4, 6) == [*range(3 * rank, 3 * rank + 3), *range(21 - 3 * rank, 24 - 3 * rank)]


def test_striped_deals_tokens_out_in_turn():
    assert [held("striped", rank, 3, 4) for rank in range(3)] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_contiguous_keeps_neighbours_together():
    assert [held("contiguous", rank, 3, 4) for rank in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("name", ["zig", "Zigzag", "", None, 3])
def test_an_unknown_layout_is_refused_with_the_names_there_are(name):
    with pytest.raises(ValueError, match=re.escape(f"unknown layout {name!r}: choose one of {', '.join(LAYOUTS)}")):
        find_layout(name)


@pytest.mark.parametrize("rank", [-1, 4])
def test_an_invalid_rank_is_refused(rank):
    with pytest.raises(ValueError, match=re.escape(f"rank={rank} is not one of 4 ranks: pass 0 to 3")):
        check_rank(rank, 4)
