"""The cost model of ``ring-attn plan --gpus``: its counts by brute force, its schedules by hand, and its measured errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulate.points import IN_A_ROW, points, undescribed
from ring_attn_cli.plan.cost import SCHEDULES, memory, seconds
from ring_attn_cli.plan.gpus import H200
from ring_attn_cli.plan.load import Load
from ring_attn_core import LAYOUTS, Band, RingPlan, causal, full, sliding_window

from .test_plan import MASKS, plans, visible

POINTS = points()

PLAIN = replace(
    H200,
    name="one unit of everything",
    forward_rate=1.0,
    backward_rate=1.0,
    forward_step=0.0,
    forward_state=0.0,
    backward_step=0.0,
    links=((2, 1.0),),
    collective=1.0,
    network=0.5,
    latency=0.0,
    network_latency=0.0,
    host_forward=0.0,
    host_backward=0.0,
    host_send=0.0,
    host_copy=0.0,
    host_push_forward=0.0,
    host_push_backward=0.0,
    copies=1e30,
    peer=1.0,
    peer_latency=0.0,
)
"""A machine on which an operation and a byte take a second, and all else takes nothing."""


def load(ranks: int = 4, tokens: int = 2, host_ranks: int = 8, mask: Band = full()) -> Load:
    """Return contiguous shards of one head of 128: 512 bytes of keys a token, 512 operations a pair."""
    return Load(RingPlan("contiguous", mask, ranks, tokens), 1, 1, 128, host_ranks)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_queries_of_a_step_are_those_that_see_a_key(layout, mask):
    for plan in plans(layout, mask, 3):
        seen = visible(plan)
        call = Load(plan, 1, 1, 8, 3)
        for rank in range(3):
            mine = [p for p in plan.positions(rank) if p < plan.length]
            for shift in range(3):
                runs = plan.k_runs[(rank - shift) % 3]
                keys = [start + stride * i for _, length, start, stride in runs for i in range(length)]
                exact = int(seen[mine][:, keys].any(1).sum()) if mine and keys else 0
                assert exact == call.queries(rank, shift), (plan, rank, shift)


def test_a_ring_hides_transfers_behind_compute_and_waits_for_the_rest():
    work, hop = 2 * 2 * 512, 2 * 512  # operations of a step, bytes of a shard of keys
    assert seconds("ring", load(), PLAIN).forward == 4 * work
    slow = replace(PLAIN, links=((4, 0.25),))
    assert seconds("ring", load(), slow).forward == 3 * 4 * hop + work
    assert seconds("ring", load(), PLAIN).backward == 2.5 * 4 * work + 4 * 2 * hop  # gradients are waited for after each step
    assert seconds("two_way", load(), PLAIN).backward < seconds("ring", load(), PLAIN).backward


def test_kernels_take_longer_beside_a_transfer_of_nccl_and_not_beside_a_copy_engine():
    work, hop = 2 * 2 * 512, 2 * 512
    crowded = replace(PLAIN, contention=0.5)
    assert seconds("ring", load(), crowded).forward == 4 * work + 3 * 0.5 * hop
    assert seconds("push", load(), crowded).forward == 4 * work
    short = replace(crowded, links=((2, 0.25),))  # a hop takes twice as long as a step: the overlap is the step
    assert seconds("ring", load(2), short).forward == 1.5 * work + (4 * hop - 1.5 * work) + work


def test_a_copy_engine_brings_keys_early_and_takes_gradients_to_their_owner_meanwhile():
    work, shard = 2 * 2 * 512, 2 * 512
    assert seconds("push", load(), PLAIN).forward == 4 * work
    assert seconds("push", load(), replace(PLAIN, peer=1 / 8)).forward == 3 * 8 * shard + work
    assert seconds("push", load(), PLAIN).backward == 2.5 * 4 * work + 2 * shard  # the last gradients' way home
    busy = replace(PLAIN, host_push_forward=4.0 * work, host_push_backward=5.0 * work)
    assert seconds("push", load(2), busy).forward == 2 * 4 * work + work
    assert seconds("push", load(2), busy).backward == 2 * 5 * work + 2.5 * work + 2 * shard


def test_messages_between_hosts_take_the_network():
    wide = replace(PLAIN, network=1 / 64, links=((2, 64.0),))
    one, two = load(host_ranks=4), load(host_ranks=2)
    assert seconds("ring", one, wide).forward == 4 * 4 * 512
    hop = 2 * 512 * 64
    assert seconds("ring", two, wide).forward == 3 * hop + 4 * 512
    assert hop < seconds("two_level", two, wide, 2).forward < 1.1 * hop
    assert seconds("ulysses", two, wide, 2).forward < seconds("ring", two, wide).forward


def test_a_gather_waits_for_all_keys_and_computes_once():
    assert seconds("gather", load(), PLAIN).forward == pytest.approx(3 * 2 * 512 + 4 * 2048)
    slow = replace(PLAIN, network=0.125)  # the shards of the other host: two of them, over two links
    assert seconds("gather", load(host_ranks=2), slow).forward == pytest.approx(2 * 512 / 0.125 + 4 * 2048)


def test_slices_of_a_window_are_all_that_direct_sends():
    wide, window = replace(PLAIN, links=((2, 1e-3),)), sliding_window(2)
    full_hop = 100 * 512 * 1e3
    call = load(2, 100, mask=window)
    assert seconds("ring", call, wide).forward > full_hop
    assert seconds("direct", call, wide).forward < 0.03 * full_hop


def test_a_step_takes_the_host_its_time_even_if_the_gpu_is_idle():
    busy = replace(H200, host_forward=1.0, host_backward=2.0)
    found = seconds("ring", load(ranks=3), busy)
    assert found.forward == pytest.approx(3.0, abs=0.01)
    assert found.backward == pytest.approx(6.0, abs=0.01)


def test_memory_of_a_gather_grows_with_the_ranks_and_that_of_a_ring_does_not():
    few, many = load(ranks=4), load(ranks=16)
    assert memory("gather", many) == 4 * memory("gather", few)
    for name in ("ring", "direct", "two_way", "push"):
        assert memory("ring", few) <= memory(name, few)
        assert memory(name, few) == memory(name, many)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_strategy_is_predicted_faster_than_its_work_alone(name):
    for mask in (causal(), full(), sliding_window(4096)):
        for ranks, group in ((2, 2), (8, 4)):
            call = Load(RingPlan("zigzag", mask, ranks, 8192), 32, 8, 128, 4)
            assert call.ideal(H200).both < seconds(name, call, H200, group).both < float("inf")


@pytest.mark.parametrize("point", [p for p in POINTS if not undescribed(p)], ids=str)
def test_the_model_is_within_ten_percent_of_what_was_measured(point):
    worst = 0.18 if point.fitted and point.strategy == "ulysses" and point.load.plan.seq_local == 2048 else 0.10
    assert abs(point.error()) < worst


def test_kernels_on_joined_shards_are_as_slow_as_predicted():
    """A gather at long shards takes less time than the ring forward and more backward, and both to 5 percent."""
    of_gathers = [p for p in POINTS if p.strategy == "gather" and p.machine == IN_A_ROW]
    assert len(of_gathers) == 3
    for point in of_gathers:
        assert max(map(abs, point.errors())) < 0.05, point
