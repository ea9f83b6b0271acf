"""Strategies in the core: the plans of joined shards against brute force, the heads of a group, records and refusals."""

# pyright: reportArgumentType=false

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from ring_attn_core import LAYOUTS, Band, Gather, RingPlan, TwoLevel, Ulysses, full, sliding_window
from ring_attn_core.kernels.call import call_of
from ring_attn_core.plan.joined import JoinedPlan
from ring_attn_core.plan.ulysses import HeadSplit
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.problem.strategies import STRATEGIES, check_device, check_fit, check_strategy, name_of, read_strategy
from ring_attn_core.problem.traffic import SentSizes, Traffic, traffic

from ..support.cases import Case
from ..support.strategies import problem_of
from .test_plan import MASKS, plans, visible


def joined(plan: RingPlan, q_shards: int, k_shards: int) -> JoinedPlan:
    own = {field.name: getattr(plan, field.name) for field in fields(RingPlan)}
    return JoinedPlan(**own, q_shards=q_shards, k_shards=k_shards)


def computed(plan: JoinedPlan) -> np.ndarray:
    """Count how often the first rank of each group of queries computes each pair of positions, read off the rows."""
    count = np.zeros((plan.seq_local * plan.ranks, plan.kv_local * plan.ranks), int)
    for shift in plan.shifts:
        for rank in range(0, plan.ranks, plan.q_shards):
            for row in (row for rows in plan.rows(rank, shift) for row in rows):
                lag = np.arange(row.q_len)[:, None] - np.arange(row.k_len)
                where = np.ix_(row.q_start + row.stride * np.arange(row.q_len), row.k_start + row.stride * np.arange(row.k_len))
                count[where] += (row.lo <= lag) & (lag <= row.hi)
    return count


@pytest.mark.pairs
@pytest.mark.parametrize(("ranks", "shards"), [(2, (1, 2)), (4, (2, 2)), (4, (1, 4)), (6, (3, 3)), (8, (2, 2)), (8, (8, 8))])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_visible_pair_of_joined_shards_is_computed_exactly_once(layout, mask, ranks, shards):
    for plan in plans(layout, mask, ranks):
        expected = np.zeros((plan.seq_local * ranks, plan.kv_local * ranks), int)
        expected[: plan.length, : plan.kv_length] = visible(plan)
        np.testing.assert_array_equal(computed(joined(plan, *shards)), expected, err_msg=str(plan))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_joined_runs_point_at_the_tokens_of_their_ranks(layout):
    plan = RingPlan(layout, full(), ranks=4, seq_local=6, length=21)
    both = joined(plan, 2, 2)
    for rank in range(4):
        first = rank // 2 * 2
        side_by_side = [*plan.positions(first), *plan.positions(first + 1)]
        for base, length, start, stride in both.q_runs[rank]:
            assert side_by_side[base : base + length] == list(range(start, start + stride * length, stride))
    assert both.q_runs == both.k_runs


def test_shifts_of_joined_shards_reach_every_step_that_a_caller_sets():
    plan = RingPlan("contiguous", full(), 8, 8, steps=(0, 3))
    shifts = joined(plan, 2, 2).shifts
    for rank in range(8):
        groups = {(rank // 2 * 2 - shift) % 8 // 2 for shift in shifts}
        assert {(rank - step) % 8 // 2 for step in plan.shifts} <= groups
    assert shifts == (0, 2, 4)
    assert joined(plan, 1, 8).shifts == (0,)


def test_a_window_pays_for_the_groups_that_it_reaches():
    plan = RingPlan("contiguous", sliding_window(3), ranks=8, seq_local=8)
    assert joined(plan, 2, 2).shifts == (0, 2)
    assert joined(plan, 8, 8).shifts == (0,)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 12])
def test_every_query_head_reads_its_own_key_head(kv_heads, ranks):
    shares = HeadSplit(12, kv_heads, ranks)
    sent = np.repeat(np.arange(kv_heads), shares.copies).reshape(ranks, shares.k_local)
    heads = np.arange(12).reshape(ranks, shares.q_local)
    for rank in range(ranks):
        read = sent[rank][np.arange(shares.q_local) // (shares.q_local // shares.k_local)]
        np.testing.assert_array_equal(read, heads[rank] // (12 // kv_heads))
    assert shares.copies == 1 or kv_heads % ranks


@pytest.mark.parametrize("strategy", ["ring", "direct", Ulysses(ranks=2)])
def test_a_strategy_that_cannot_keep_the_global_order_is_refused(strategy):
    with pytest.raises(
        ValueError, match=f'{re.escape(repr(strategy))} adds keys .*order="global": pass strategy="gather" or "auto"'
    ):
        Options(strategy=strategy, order="global")
    with pytest.raises(ValueError, match=r'Gather\(groups=2\) gathers keys by groups .*: pass strategy="gather" or "auto"'):
        Options(strategy=Gather(groups=2), order="global")
    with pytest.raises(ValueError, match=r"order must be .*, got 'any'"):
        Options(order="any")


@pytest.mark.parametrize("strategy", [*STRATEGIES, Ulysses(ranks=4), Gather(groups=4)])
def test_options_with_a_strategy_are_read_back_from_their_text(strategy):
    options = Options(strategy=strategy)
    assert Options.read(options.text, options.counts) == options
    assert read_strategy(str(strategy)) == strategy


def test_every_option_of_a_call_is_read_back_from_its_text_and_counts():
    options = Options(
        layout="striped",
        mask=Band(-3, 5),
        length=7,
        kv_length=9,
        scale=0.5,
        softcap=2.0,
        dropout_rate=0.25,
        dropout_offset=(3, 4),
        order="global",
        backend="triton",
        deterministic=True,
        steps=(0, 2),
        v_dim=8,
    )
    assert all(
        getattr(options, field.name) != getattr(Options(), field.name) for field in fields(Options) if field.name != "strategy"
    )
    assert Options.read(options.text, options.counts) == options
    assert Options.read(Options().text, Options().counts) == Options()


@pytest.mark.parametrize(
    ("strategy", "ranks", "heads", "why"),
    [
        ("ulysses", 4, 6, "6 query heads cannot be dealt evenly to 4 ranks"),
        (Ulysses(ranks=2), 4, 3, "3 query heads cannot be dealt evenly to 2 ranks"),
        (Ulysses(ranks=3), 4, 6, "groups of 3 ranks do not divide a ring of 4"),
        (TwoLevel(ranks=3), 4, 6, "hosts of 3 ranks do not divide a ring of 4"),
        (Gather(groups=3), 4, 6, "8 key heads cannot be cut into 3 equal groups; Gather"),
        (Gather(groups=16), 1, 16, "8 key heads cannot be cut into 16 equal groups; Gather"),
        ("two_level", 4, 4, "how many ranks a host has is not known"),
    ],
)
def test_a_strategy_that_does_not_divide_the_ring_or_the_heads_is_refused(strategy, ranks, heads, why):
    with pytest.raises(ValueError, match=why):
        check_fit(strategy, ranks, heads, 8)
    for fitting in ("ring", "ulysses", Ulysses(ranks=2), TwoLevel(ranks=2), Gather(groups=2), Gather(groups=8)):
        check_fit(fitting, 4, 8, 8)


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_strategies_between_the_memories_of_gpus_are_refused_elsewhere(device):
    check_device("push", "torch", "cuda")
    with pytest.raises(ValueError, match=f"and q is on '{device}': move the tensors to GPUs of one host"):
        check_device("push", "torch", device)
    with pytest.raises(ValueError, match="it exists in PyTorch only"):
        check_device("push", "jax", "cuda")
    check_device("two_way", "jax", device)


@pytest.mark.parametrize(
    ("keys", "arrays", "sent"), [(16, ["key_mask"], 2 * 2), (12, ["key_mask"], 2 * 2), (12, ["key_extents"], 2 * 96)]
)
def test_a_message_counts_a_bit_for_a_masked_key_and_two_numbers_for_its_extent(keys, arrays, sent):
    """Batch 2: a mask fills up its last byte, and sinks do not travel."""
    plain = Problem((2, 16, 4, 8), (2, keys, 4, 8), (2, keys, 4, 8), ("float32",) * 3, "cpu", 4)
    described = tuple(OptionalArray(name, (), "") for name in (*arrays, "sinks"))
    assert SentSizes(replace(plain, arrays=described), 4, 4).of_keys == sent
    ring = lambda problem: traffic(replace(problem, options=Options(mask=full(), strategy="ring")))
    forward, backward = (a.bytes - b.bytes for a, b in zip(ring(replace(plain, arrays=described)), ring(plain), strict=True))
    assert (forward, backward) == (3 * sent, 3 * sent)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, "2", None, True])
def test_a_group_of_no_number_of_ranks_is_refused(ranks: Any):
    with pytest.raises(ValueError, match=r"Ulysses\(ranks=...\) is the number of ranks in a group, at least 1, got"):
        Ulysses(ranks=ranks)
    assert Ulysses(ranks=np.int64(3)) == Ulysses(ranks=3)
    check_strategy(Ulysses(ranks=3))
    with pytest.raises(ValueError, match=r"Gather\(groups=...\) is the number of groups of key heads, at least 1, got"):
        Gather(groups=ranks)
    assert Gather(groups=np.int64(3)) == Gather(groups=3)


@pytest.mark.parametrize("strategy", ["telepathy", None, ""])
def test_an_unknown_strategy_is_refused_with_the_names_there_are(strategy: Any):
    with pytest.raises(ValueError, match=f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}"):
        check_strategy(strategy)


def test_the_kernels_get_the_sizes_of_joined_shards():
    problem = problem_of(Case(heads=8, kv_heads=2, length=64), "torch")
    with_strategy = lambda strategy: replace(problem, options=replace(problem.options, strategy=strategy))
    call = call_of(with_strategy(Ulysses(ranks=2)), "triton")
    assert (call.seq_local, call.kv_local, call.heads, call.kv_heads, call.q_runs, call.k_runs) == (32, 32, 4, 1, 4, 4)
    call = call_of(with_strategy("gather"), "triton")
    assert (call.seq_local, call.kv_local, call.heads, call.kv_heads, call.q_runs, call.k_runs) == (16, 64, 8, 2, 2, 8)
    assert call.packed
    call = call_of(with_strategy(Gather(groups=2)), "triton")
    assert (call.seq_local, call.kv_local, call.heads, call.kv_heads, call.q_runs, call.k_runs) == (16, 64, 4, 1, 2, 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_two_ways_reach_every_shift_once_by_the_shorter_way(mask, ranks):
    for plan in plans("contiguous", mask, ranks):
        near, far = plan.ways
        assert sorted((0, *near, *far)) == list(plan.shifts)
        assert [min(s, ranks - s) for s in near] == list(near) == sorted(near)
        assert [min(s, ranks - s) for s in far] == sorted(ranks - s for s in far)


def test_auto_is_the_ring_and_nothing_travels_where_no_rank_needs_keys():
    assert name_of("auto") == "ring"
    for strategy in ("gather", "ulysses", Ulysses(ranks=2)):
        problem = problem_of(Case("contiguous", sliding_window(0), strategy=strategy), "jax")
        assert problem.strategy == "ring"
        assert traffic(problem) == (Traffic(0, 0), Traffic(0, 0))
        assert problem.steps is problem.plan
