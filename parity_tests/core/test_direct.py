"""The plan of the strategy "direct" against brute force, and the bytes that a window costs."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from ring_attn_core import LAYOUTS, RingPlan, causal, full, sliding_window
from ring_attn_core.plan.direct import DirectPlan, Slice
from ring_attn_core.problem.traffic import Traffic, traffic

from ..support.cases import Case
from ..support.strategies import problem_of
from .test_plan import MASKS, computed, plans

RANKS = pytest.mark.parametrize("ranks", [2, 3, 5])


def direct(plan: RingPlan) -> DirectPlan:
    return DirectPlan(**{field.name: getattr(plan, field.name) for field in fields(RingPlan)})


def keys_seen(plan: DirectPlan, shift: int, owner: int) -> np.ndarray:
    """The local indices of the owner's keys that the rank ``shift`` after it computes with, read off the rows."""
    keys = replace(plan, seq_local=plan.kv_local, length=plan.kv_length).positions(owner)
    rows = [row for rows in plan.rows((owner + shift) % plan.ranks, shift) for row in rows]
    seen = set()
    for row in rows:
        lag = np.arange(row.q_len)[:, None] - np.arange(row.k_len)
        seen |= {row.k_start + row.stride * j for j in np.flatnonzero(((row.lo <= lag) & (lag <= row.hi)).any(0))}
    return np.flatnonzero(np.isin(keys, list(seen)))


@pytest.mark.pairs
@RANKS
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_are_the_shortest_that_hold_every_key_that_is_seen(layout, mask, ranks):
    for plan in map(direct, plans(layout, mask, ranks)):
        for shift in plan.shifts[1:]:
            for owner in range(ranks):
                seen = keys_seen(plan, shift, owner)
                sent = [(each.firsts[owner], each.firsts[owner] + each.lengths[owner]) for each in plan.slices(shift)]
                of_slot = [seen[seen // plan.k_slot == slot] for slot in np.unique(seen // plan.k_slot)] if seen.size else []
                expected = {token for part in of_slot for token in range(part[0], part[-1] + 1)}
                assert {token for first, end in sent for token in range(first, end)} == expected, (plan, shift, owner)
                assert sum(end - first for first, end in sent) == len(expected), "a token is sent twice"


@pytest.mark.pairs
@RANKS
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_made_equally_long_hold_their_own_and_no_token_twice(layout, mask, ranks):
    for plan in map(direct, plans(layout, mask, ranks)):
        for shift in plan.shifts[1:]:
            end_before = np.zeros(ranks, int)
            for each in plan.slices(shift):
                firsts, own = np.array(each.even_firsts), np.array(each.firsts)
                assert (firsts >= end_before).all()
                assert (firsts <= own).all()
                assert (firsts + each.longest >= own + each.lengths).all()
                end_before = firsts + each.longest
                assert (end_before <= plan.kv_local).all()


def sent(layout: str, window: int, local: int, ranks: int = 4) -> dict[int, set[int]]:
    """The tokens that a rank sends at each shift, over all ranks; those that send nothing are left out."""
    plan = DirectPlan(layout, sliding_window(window), ranks, local)
    tokens = lambda shift: {sum(each.lengths[owner] for each in plan.slices(shift)) for owner in range(ranks)}
    return {shift: tokens(shift) - {0} for shift in plan.shifts[1:]}


@pytest.mark.parametrize(("window", "local"), [(4096, 65_536), (1024, 8192)])
def test_a_window_is_one_slice_contiguous_one_each_way_zigzag_and_whole_shards_striped(window, local):
    assert sent("contiguous", window, local) == {1: {window}}
    assert sent("zigzag", window, local) == {1: {window}, 3: {window}}
    striped = sent("striped", window, local)
    assert set(striped) == {1, 2, 3}
    assert min(map(min, striped.values())) >= local - 1, "one key at an end of the sequence is seen by its own rank alone"


def test_a_causal_zigzag_sends_the_second_slot_to_earlier_ranks_alone():
    plan = DirectPlan("zigzag", causal(), 4, 16)
    for shift in plan.shifts[1:]:
        later = tuple(8 if owner + shift >= 4 else 0 for owner in range(4))
        assert [each.lengths for each in plan.slices(shift)] == [(8,) * 4, later]


def test_a_full_mask_sends_whole_shards_in_one_piece():
    for layout in LAYOUTS:
        plan = DirectPlan(layout, full(), 4, 16)
        for shift in (1, 2, 3):
            assert plan.slices(shift) == (Slice((0,) * 4, (16,) * 4, 16),)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_bytes_of_a_window_are_those_of_its_slices(framework):
    case = Case("contiguous", sliding_window(3), length=32, batch=1, heads=1, kv_heads=1, key_mask="random", strategy="direct")
    problem = problem_of(case, framework)
    keys, gradients = Traffic(1, 3 * 32 * 4 + 1), Traffic(1, 3 * 32 * 4)
    assert traffic(problem, 0) == (keys, keys)
    assert traffic(problem, 1) == (keys, keys + gradients)
    assert traffic(problem, 3) == (Traffic(0, 0), gradients)


def test_the_visible_keys_of_steps_that_a_caller_sets_are_sent_too():
    plan = DirectPlan("contiguous", causal(), 4, 8, steps=(0, 2))
    assert [each.lengths for each in plan.slices(2)] == [(8, 8, 0, 0)]
    assert computed(plan, 2).any()
