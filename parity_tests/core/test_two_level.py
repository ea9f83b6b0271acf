"""Rings over two levels in the core: every visible pair once, the order of hosts, and what windows and callers leave out."""

# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from ring_attn_core import LAYOUTS, RingPlan, TwoLevel, full, sliding_window
from ring_attn_core.plan.two_level import InnerRing, TwoLevelPlan
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.strategies import check_fit, read_strategy
from ring_attn_core.problem.traffic import traffic

from ..support.cases import Case
from ..support.strategies import problem_of
from .test_plan import MASKS, plans, visible

SIZES = [(2, 1), (2, 2), (4, 2), (6, 2), (6, 3), (8, 4)]


def on_hosts(plan: RingPlan, host_ranks: int) -> TwoLevelPlan:
    return TwoLevelPlan(**{field.name: getattr(plan, field.name) for field in fields(RingPlan)}, host_ranks=host_ranks)


def stops(plan: TwoLevelPlan) -> list[tuple[int, int]]:
    return [(ring.outer, inner) for ring in plan.inner_rings for inner in ring.inner]


@pytest.mark.pairs
@pytest.mark.parametrize(("ranks", "host_ranks"), SIZES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_visible_pair_is_computed_exactly_once_on_two_levels(layout, mask, ranks, host_ranks):
    for plan in plans(layout, mask, ranks):
        two, count = on_hosts(plan, host_ranks), np.zeros((plan.seq_local * ranks, plan.kv_local * ranks), int)
        for outer, inner in stops(two):
            for rank in range(ranks):
                for row in (row for rows in two.rows(rank, two.shift(rank, outer, inner)) for row in rows):
                    lag = np.arange(row.q_len)[:, None] - np.arange(row.k_len)
                    where = [
                        start + row.stride * np.arange(n) for start, n in ((row.q_start, row.q_len), (row.k_start, row.k_len))
                    ]
                    count[np.ix_(*where)] += (row.lo <= lag) & (lag <= row.hi)
        expected = np.zeros_like(count)
        expected[: plan.length, : plan.kv_length] = visible(plan)
        np.testing.assert_array_equal(count, expected, err_msg=str(plan))


@pytest.mark.parametrize(("ranks", "host_ranks"), SIZES)
def test_hops_inside_hosts_and_crossings_bring_the_keys_to_every_stop(ranks, host_ranks):
    """Follow the keys of every rank by the hops of the plan alone."""
    two = on_hosts(RingPlan("striped", full(), ranks, 4), host_ranks)
    held = {rank: rank for rank in range(ranks)}
    moved = lambda by: {by(rank): owner for rank, owner in held.items()}
    for ring in two.inner_rings:
        entered, at = dict(held), 0
        for inner in ring.inner:
            hop, at = inner - at, inner
            held = moved(lambda rank, hop=hop: rank // host_ranks * host_ranks + (rank + hop) % host_ranks)
            for rank in range(ranks):
                assert held[rank] == (rank - two.shift(rank, ring.outer, inner)) % ranks
        held = entered
        held = moved(lambda rank, by=ring.crossing * host_ranks: (rank + by) % ranks)


def test_a_full_ring_crosses_once_less_than_there_are_hosts():
    two = on_hosts(RingPlan("striped", full(), 8, 4), 4)
    assert two.inner_rings == (InnerRing(0, (0, 1, 2, 3), 1), InnerRing(1, (0, 1, 2, 3), 0))
    assert two.crossing_home == 1
    forward, backward = traffic(problem_of(Case("striped", full(), 8, strategy=TwoLevel(ranks=4)), "torch"))
    assert forward.messages == 8 - 1
    assert backward.messages == 8 - 1 + 8 + 2


def test_a_window_leaves_out_the_hosts_and_places_that_it_does_not_reach():
    two = on_hosts(RingPlan("contiguous", sliding_window(3), 8, 4), 4)
    assert two.inner_rings == (InnerRing(0, (0, 1), 1), InnerRing(1, (1,), 0))
    assert (two.inner_rings[1].key_hops, two.inner_rings[1].gradient_hops) == (1, 1)
    assert on_hosts(RingPlan("contiguous", sliding_window(0), 8, 4), 4).inner_rings == (InnerRing(0, (0,), 0),)


@pytest.mark.parametrize("steps", [(0, 3), (0, 1, 7), (0,)])
def test_every_step_that_a_caller_sets_is_a_stop_of_every_rank(steps):
    two = on_hosts(RingPlan("contiguous", full(), 8, 4, steps=steps), 4)
    for rank in range(8):
        assert {*steps} <= {two.shift(rank, *stop) for stop in stops(two)}


def test_options_with_two_levels_are_read_back_from_their_text():
    options = Options(strategy=TwoLevel(ranks=4))
    assert Options.read(options.text, options.counts) == options
    assert read_strategy("TwoLevel(ranks=4)") == TwoLevel(ranks=np.int64(4))


@pytest.mark.parametrize("ranks", [0, 2.0, None, True])
def test_a_host_of_no_number_of_ranks_is_refused(ranks: Any):
    with pytest.raises(ValueError, match=r"TwoLevel\(ranks=...\) is the number of ranks of a host, at least 1, got"):
        TwoLevel(ranks=ranks)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (TwoLevel(ranks=3), r"strategy=TwoLevel\(ranks=3\) cannot run this: hosts of 3 ranks do not divide a ring of 4"),
        ("two_level", r"strategy='two_level' cannot run this: how many ranks a host has is not known, pass TwoLevel\(ranks=n\)"),
    ],
)
def test_hosts_that_do_not_divide_the_ring_are_refused(strategy, message):
    with pytest.raises(ValueError, match=message):
        check_fit(strategy, 4, 8, 8)
