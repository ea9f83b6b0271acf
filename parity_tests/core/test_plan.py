"""The plan against brute force over every pair of tokens of the whole sequence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_attn_core import Band, RingPlan, causal, full, sliding_window
from ring_attn_core.layouts import LAYOUTS, padded_local, slots

RANKS = [1, 2, 3, 4, 8]
MASKS = {
    "full": full(),
    "causal": causal(),
    "causal+5": causal(offset=5),
    "causal-7": causal(offset=-7),
    "window4": sliding_window(4),
    "window3,2": sliding_window(3, after=2),
    "window1-12": sliding_window(1, offset=-12),
    "nothing": causal(offset=-1000),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
each_ring = pytest.mark.parametrize("ranks", RANKS)


def plans(layout: str, mask: Band, ranks: int) -> Iterator[RingPlan]:
    """Lengths that fit and that do not, more padding than needed (whole shards of it), no tokens, and keys of other lengths."""
    unit = slots(layout)
    exact = 3 * unit * ranks
    for length, more, kv_length, kv_more in (
        (exact, 0, None, 0),
        (exact - 1, 0, None, 0),
        (2 * unit * ranks - ranks, 0, None, 0),
        (5, 2, None, 0),
        (1, 0, None, 0),
        (0, 1, None, 0),
        (exact, 0, 17, 0),
        (7, 1, 31, 2),
        (19, 0, 1, 3),
    ):
        local = padded_local(layout, ranks, length) + more * unit
        kv_local = local if kv_length is None else padded_local(layout, ranks, kv_length) + kv_more * unit
        yield RingPlan(layout, mask, ranks, local, kv_local, length, length if kv_length is None else kv_length)


def visible(plan: RingPlan) -> np.ndarray:
    """bool [length, kv_length]: what the mask lets through, by its definition."""
    pairs = [[plan.mask.sees(q, k) for k in range(plan.kv_length)] for q in range(plan.length)]
    return np.array(pairs, bool).reshape(plan.length, plan.kv_length)


def computed(plan: RingPlan, shift: int) -> np.ndarray:
    """int [held, kv_held]: how often each pair of positions is computed at ``shift``, read off the rows like a kernel does."""
    count = np.zeros((plan.seq_local * plan.ranks, plan.kv_local * plan.ranks), int)
    for rank in range(plan.ranks):
        for rows in plan.rows(rank, shift):
            for row in rows:
                i, j = np.arange(row.q_len), np.arange(row.k_len)
                lag = i[:, None] - j
                count[np.ix_(row.q_start + row.stride * i, row.k_start + row.stride * j)] += (row.lo <= lag) & (lag <= row.hi)
    return count


@pytest.mark.pairs
@each_ring
@each_mask
@each_layout
def test_every_visible_pair_is_computed_exactly_once(layout: str, mask: Band, ranks: int):
    for plan in plans(layout, mask, ranks):
        expected = np.zeros((plan.seq_local * ranks, plan.kv_local * ranks), int)
        expected[: plan.length, : plan.kv_length] = visible(plan)
        np.testing.assert_array_equal(sum(computed(plan, shift) for shift in plan.shifts), expected, err_msg=str(plan))


@pytest.mark.pairs
@each_ring
@each_mask
@each_layout
def test_a_step_is_skipped_where_and_only_where_no_rank_sees_anything(layout: str, mask: Band, ranks: int):
    for plan in plans(layout, mask, ranks):
        needed = [shift for shift in range(ranks) if shift == 0 or computed(plan, shift).any()]
        assert list(plan.shifts) == needed, plan


@pytest.mark.pairs
@each_ring
@each_mask
@each_layout
def test_rows_meet_the_keys_of_the_rank_shift_places_before(layout: str, mask: Band, ranks: int):
    for plan in plans(layout, mask, ranks):
        keys = replace(plan, seq_local=plan.kv_local, length=plan.kv_length)
        for rank in range(ranks):
            for shift in range(ranks):
                for rows in plan.rows(rank, shift):
                    for row in rows:
                        queries = plan.positions(rank)[row.q_base : row.q_base + row.q_len]
                        assert queries == [row.q_start + row.stride * i for i in range(row.q_len)]
                        held = keys.positions((rank - shift) % ranks)[row.k_base : row.k_base + row.k_len]
                        assert held == [row.k_start + row.stride * j for j in range(row.k_len)]
                        assert row.shard == 0


@pytest.mark.pairs
@each_ring
@each_mask
@each_layout
def test_work_is_the_number_of_pairs(layout: str, mask: Band, ranks: int):
    for plan in plans(layout, mask, ranks):
        pairs = visible(plan)
        work = [pairs[[p for p in plan.positions(rank) if p < plan.length]].sum() for rank in range(ranks)]
        assert [plan.work(rank) for rank in range(ranks)] == work
        assert plan.balance == pytest.approx(max(work) / np.mean(work) if any(work) else 1)


@pytest.mark.pairs
@each_ring
@each_mask
@each_layout
def test_hops_lead_through_the_shifts_and_the_last_one_home(layout: str, mask: Band, ranks: int):
    for plan in plans(layout, mask, ranks):
        assert [sum(plan.hops[:step]) for step in range(len(plan.shifts))] == list(plan.shifts)
        assert all(hop > 0 for hop in plan.hops)
        assert 0 <= plan.home < ranks
        assert (sum(plan.hops) + plan.home) % ranks == 0


@each_ring
@each_layout
def test_positions_are_a_permutation_and_padding_stands_last(layout: str, ranks: int):
    for plan in plans(layout, full(), ranks):
        positions = [plan.positions(rank) for rank in range(ranks)]
        assert sorted(chain(*positions)) == list(range(plan.seq_local * ranks))
        valid = [
            [p for base, tokens, *_ in plan.q_runs[rank] for p in positions[rank][base : base + tokens]] for rank in range(ranks)
        ]
        assert sorted(chain(*valid)) == list(range(plan.length))


def test_shift_0_stays_even_if_no_query_sees_a_key_at_it():
    plan = RingPlan("contiguous", sliding_window(0, offset=-4), ranks=3, seq_local=4)
    assert plan.shifts == (0, 1)
    assert [plan.area(rank, 0) for rank in range(3)] == [0, 0, 0]
    assert RingPlan("zigzag", causal(-99), ranks=4, seq_local=4).shifts == (0,)


def test_zigzag_shares_causal_work_equally():
    balance = {layout: RingPlan(layout, causal(), ranks=8, seq_local=1024).balance for layout in LAYOUTS}
    assert balance["contiguous"] == pytest.approx(1.875, abs=5e-4)
    assert 1 < balance["striped"] <= 1.01
    assert balance["zigzag"] == 1


def test_shifts_of_a_window_are_the_ones_it_reaches():
    steps = {layout: RingPlan(layout, sliding_window(1024), ranks=8, seq_local=1024).shifts for layout in LAYOUTS}
    assert [len(steps[layout]) for layout in ("contiguous", "zigzag", "striped")] == [2, 5, 8]
    assert steps["contiguous"] == (0, 1)


def test_a_plan_is_a_frozen_value():
    plan = RingPlan("zigzag", causal(), 4, 16)
    same = RingPlan("zigzag", causal(), 4, 16, 16, 64, 64)
    assert plan == same
    assert {plan: "found"}[same] == "found"
    assert plan.shifts == same.shifts
    assert plan == same, "what is computed on demand must not count"
    assert plan != replace(plan, mask=full())
    with pytest.raises(FrozenInstanceError):
        plan.ranks = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "kv_local", "length", "kv_length"),
    [
        ({}, 6, 24, 24),
        ({"length": 20}, 6, 20, 20),
        ({"kv_local": 8}, 8, 24, 32),
        ({"kv_local": 8, "length": 20}, 8, 20, 32),
        ({"kv_length": 3}, 6, 24, 3),
    ],
    ids=str,
)
def test_lengths_left_out_are_what_the_shards_hold(given: dict[str, Any], kv_local: int, length: int, kv_length: int):
    plan = RingPlan("zigzag", full(), 4, 6, **given)
    assert (plan.kv_local, plan.length, plan.kv_length) == (kv_local, length, kv_length)


ERRORS = [
    (
        {"seq_local": 1025},
        "zigzag over 8 ranks needs an even number of tokens a rank, got 1025 (8200 in all) in q: "
        "shard with to_layout, which pads to 8208, and pass length=8200",
    ),
    (
        {"seq_local": 1025, "length": 8195},
        "zigzag over 8 ranks needs an even number of tokens a rank, got 1025 (8200 in all) in q: "
        "shard with to_layout, which pads to 8208, and pass length=8195",
    ),
    (
        {"kv_local": 3},
        "zigzag over 8 ranks needs an even number of tokens a rank, got 3 (24 in all) in k: "
        "shard with to_layout, which pads to 32, and pass kv_length=24",
    ),
    (
        {"length": 33},
        "length=33 is more than the 8 shards of q hold (4 tokens each, 32 in all): pass every rank a shard of at least 6 tokens",
    ),
    (
        {"kv_length": 99},
        "kv_length=99 is more than the 8 shards of k hold (4 tokens each, 32 in all): "
        "pass every rank a shard of at least 14 tokens",
    ),
    ({"length": -1}, "length is the true global number of tokens, an int of at least 0 (static under jit), got -1"),
    ({"kv_length": 2.5}, "kv_length is the true global number of tokens, an int of at least 0 (static under jit), got 2.5"),
    ({"ranks": 0}, "a ring needs at least 1 rank, got 0"),
    (
        {"mask": "causal"},
        "mask must be full(), causal(...) or sliding_window(...), got 'causal': pass mask=causal(), or mask=full() for all keys",
    ),
    (
        {"mask": None},
        "mask must be full(), causal(...) or sliding_window(...), got None: pass mask=causal(), or mask=full() for all keys",
    ),
    (
        {"mask": True},
        "mask must be full(), causal(...) or sliding_window(...), got True: pass key_mask=, a bool array, False for "
        "padding, and for packed documents extents=, made by document_extents",
    ),
    ({"layout": "ziggy"}, f"unknown layout 'ziggy': choose one of {', '.join(LAYOUTS)}"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[str(change) for change, _ in ERRORS])
def test_a_mistake_is_answered_with_what_was_expected_what_came_and_what_to_do(change: dict, message: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        RingPlan(**{"layout": "zigzag", "mask": causal(), "ranks": 8, "seq_local": 4, **change})
    assert str(error.value) == message


def test_importing_the_core_imports_no_other_package():
    code = (
        "import sys; import ring_attn_core, ring_attn_core.plan.ring\n"
        "import ring_attn_core.kernels.backends\n"
        "found = {'jax', 'torch', 'numpy', 'rich', 'typer', 'matplotlib', 'triton'} & set(sys.modules)\n"
        "assert not found, found"
    )
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
