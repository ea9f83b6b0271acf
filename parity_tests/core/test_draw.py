"""Pictures of plans: they show what the plan computes, fit where they are shown, and are the same each time."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ring_attn_cli.plan import terminal
from ring_attn_cli.plan.terminal import Axis, check_picture, colour, draw, find_computing, holds, save, short, title
from ring_attn_core import Band, RingPlan, causal, full, sliding_window
from ring_attn_core.layouts import LAYOUTS, padded_local

from ..support.selection import first

MASKS = {"full": full(), "causal": causal(), "window": sliding_window(5, after=1), "offset": causal(-3)}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def make(layout: str, mask: Band, ranks: int, length: int) -> RingPlan:
    return RingPlan(layout, mask, ranks, padded_local(layout, ranks, length), length=length)


def printed(plan: RingPlan, width: int = 80, drawn_for: int | None = None) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(draw(plan, drawn_for or 80))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("most", [100, 12, 5], ids="{}_cells".format)
@each_mask
@each_layout
def test_a_cell_is_filled_where_and_only_where_its_rank_computes_a_pair(layout: str, mask: Band, most: int):
    plan = make(layout, mask, 3, 25)
    axis = Axis.of(plan, most)
    owner = {p: rank for rank in range(3) for p in plan.positions(rank)}
    cell = lambda c: range(c * axis.block, min((c + 1) * axis.block, plan.length))
    for shift in range(3):
        for a, line in enumerate(find_computing(plan, axis, shift)):
            for b, rank in enumerate(line):
                pairs = ((q, k) for q in cell(a) for k in cell(b) if mask.sees(q, k))
                busy = {owner[q] for q, k in pairs if (owner[q] - owner[k]) % 3 == shift}
                assert rank in busy if busy else rank is None


@each_layout
def test_blocks_cover_the_sequence_and_no_more_than_were_asked_for(layout: str):
    plan = make(layout, causal(), 4, 1000)
    for most in (1, 7, 64, 5000):
        axis = Axis.of(plan, most)
        assert len(axis.cells) <= most
        assert sum(run.length for cell in axis.cells for runs in cell.values() for run in runs) == 1000
        for c, cell in enumerate(axis.cells):
            assert all(p // axis.block == c for runs in cell.values() for run in runs for p in run.positions())


def test_neighbouring_blocks_that_all_ranks_share_show_different_ranks():
    axis = Axis.of(make("striped", causal(), 4, 4096), 8)
    assert [axis.ranks(cell)[0] for cell in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_terminal_shows_who_computes_what_at_each_step():
    shown = printed(RingPlan("zigzag", causal(), 2, 8))
    matrices = re.search(r"step 0, shift 0 +step 1, shift 1\s*\n((?:[.01 ]+\n){16})", shown)
    assert matrices, shown
    left, right = zip(*(line.split() for line in matrices[1].splitlines()), strict=True)
    owner = "0000111111110000"
    for shift, matrix in enumerate((left, right)):
        for q, line in enumerate(matrix):
            expected = [owner[q] if k <= q and (owner[q] == owner[k]) == (shift == 0) else "." for k in range(16)]
            assert line == "".join(expected)
    assert "tokens 0000111111110000" in shown
    assert "0:4, 12:16" in shown


@pytest.mark.pairs
@pytest.mark.parametrize("length", [8191, 1_000_003])
@pytest.mark.parametrize("ranks", first([3, 1, 8]))
@each_mask
@each_layout
def test_the_terminal_picture_fits_80_columns(layout: str, mask: Band, ranks: int, length: int):
    plan = make(layout, mask, ranks, length)
    shown, whole = printed(plan), printed(plan, width=400)
    assert max(map(len, shown.splitlines())) <= 80
    assert sorted(shown.replace("─", "").split()) == sorted(whole.replace("─", "").split()), "something is cut off at 80 columns"
    work = [plan.work(rank) for rank in range(ranks)]
    assert [f"{share:.3f}" for share in (each * ranks / sum(work) for each in work) if f"{share:.3f}" not in shown] == []


@pytest.mark.pairs
@pytest.mark.parametrize("width", first([30, 79, 132, 300, 40, 60, 100, 200], 4))
@pytest.mark.parametrize(
    "plan",
    [
        make("zigzag", causal(), 8, 8192),
        make("striped", sliding_window(5, after=1), 3, 8191),
        make("contiguous", full(), 16, 1_000_003),
        make("zigzag", causal(), 1, 64),
    ],
    ids=title,
)
def test_the_terminal_picture_fits_any_width_and_nothing_is_cut_off(plan: RingPlan, width: int):
    shown, free = printed(plan, width, width), printed(plan, 1000, width)
    assert max(map(len, shown.splitlines())) <= width
    joined = lambda text: sorted(re.sub(r"[\s─]", "", text))  # what is too long for a line may stand on two
    assert "…" not in shown
    assert joined(shown) == joined(free)


def test_a_wider_terminal_shows_finer_cells_and_a_narrower_one_coarser():
    plan = make("contiguous", causal(), 2, 10_000)
    cells = {}
    for width in (20, 40, 60, 80, 120, 200):
        shown = printed(plan, width, width)
        strip = re.search(r"tokens ([01]+)", shown)
        matrix = re.search(r"cell\s+is\s+([0-9,]+)", shown)
        assert strip and matrix
        cells[width] = len(strip[1]), -(-10_000 // int(matrix[1].replace(",", "")))
    assert [strip for strip, _ in cells.values()] == sorted({strip for strip, _ in cells.values()})
    assert cells[80] == (56, 18)
    assert cells[40][1] < cells[80][1] < cells[120][1] < cells[200][1]
    assert all(10 <= matrix <= 40 for _, matrix in cells.values())


def test_more_than_eight_steps_are_counted():
    shown = printed(make("contiguous", causal(), 12, 120))
    assert "step 7, shift 7" in shown
    assert "step 8" not in shown
    assert "... 4 more steps" in shown


def test_padding_and_empty_sequences_can_be_drawn(tmp_path: Path):
    for plan in (
        RingPlan("zigzag", causal(), 4, 8, length=3),
        RingPlan("striped", full(), 2, 0),
        make("contiguous", full(), 2, 5),
    ):
        assert "balance 1.000" in printed(plan) or plan.balance != 1
        save(draw(plan), tmp_path / "plan.svg", 80)
    assert "tokens 000" + "/" * 29 in printed(RingPlan("zigzag", causal(), 4, 8, length=3))


def test_the_first_eight_ranks_have_colours_of_their_own_and_the_next_eight_too():
    colours = [colour(rank) for rank in range(16)]
    assert len(set(colours)) == 16
    assert all(re.fullmatch(r"#[0-9A-F]{6}", each) for each in colours)
    assert colour(16) == colour(0)


def test_equal_plans_are_saved_as_equal_files(tmp_path: Path):
    for name in "ab":
        save(draw(make("zigzag", causal(), 2, 16)), tmp_path / name, 80)
    a, b = ((tmp_path / name).read_text() for name in "ab")
    assert a == b and a.startswith("<svg")
    assert all(each in a for each in (colour(0).lower(), colour(1).lower(), "0:4,&#160;12:16"))


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.png", "plan.svg.png"])
def test_another_suffix_is_refused_with_the_one_there_is(name: str, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"a plan is drawn as \.svg, no longer as \.png, got '{name}': end the file name in"):
        check_picture(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_runs_are_written_as_slices_of_the_positions_they_hold():
    for layout in LAYOUTS:
        plan = make(layout, causal(), 3, 29)
        for rank in range(3):
            slices = [slice(*map(int, part.split(":"))) for part in holds(plan.q_runs[rank]).split(", ")]
            assert [p for part in slices for p in range(29)[part]] == [p for p in plan.positions(rank) if p < 29]
    assert holds(((0, 0, 8, 1), (2, 0, 30, 1))) == "padding"


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        (0, "0"), (9999, "9999"), (10_000, "10.0k"), (99_949, "99.9k"), (99_950, "100k"), (999_499, "999k"), (999_500, "1.00M"),
        (33_558_528, "33.6M"), (10**12, "1.00T"),
    ],
)  # fmt: skip
def test_counts_are_written_short(pairs: int, text: str):
    assert short(pairs) == text


@pytest.mark.parametrize(
    ("band", "text"),
    [
        (full(), "full attention"),
        (causal(), "causal mask"),
        (causal(-1200), "causal mask with offset -1,200"),
        (sliding_window(1024), "window of 1,024 before and 0 after"),
        (sliding_window(4, 2, offset=1), "window of 3 before and 3 after"),
        (sliding_window(1, offset=-5), "mask 5 <= q_pos - k_pos <= 6"),
        (Band(hi=3), "mask q_pos - k_pos <= 3"),
    ],
)
def test_a_mask_is_named_in_words_where_there_are_any(band: Band, text: str):
    assert terminal.mask_in_words(band) == text


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (RingPlan("zigzag", causal(), 1, 4), "1 step, nothing travels"),
        (RingPlan("zigzag", causal(), 4, 4), "4 steps at shifts 0 to 3, 3 hops by 1, gradients go home by 1"),
        (RingPlan("contiguous", sliding_window(3), 4, 4), "2 steps at shifts 0 and 1, 1 hop by 1, gradients go home by 3"),
        (RingPlan("zigzag", sliding_window(3), 8, 8), "3 steps at shifts 0 1 7, hops by 1 and 6, gradients go home by 1"),
    ],
    ids=["alone", "every_step", "near", "both_ways"],
)
def test_the_way_of_the_keys_is_told_in_words(plan: RingPlan, text: str):
    assert terminal.travel_in_words(plan) == text
