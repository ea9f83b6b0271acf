"""The tiles of ``order="global"`` on GPUs: whole tiles at fixed positions, and launches that do not depend on the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ring_attn_core import causal
from ring_attn_core.cache.checks import check_whole
from ring_attn_core.cache.spec import CacheSizes, CacheSpec
from ring_attn_core.kernels import steps
from ring_attn_core.kernels.call import call_of
from ring_attn_core.kernels.launch import Launch
from ring_attn_core.layouts import padded_local
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.plan.global_order import TILE, GlobalPlan
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

LENGTH = 5003
LAYOUTS: list[Any] = ["contiguous", "zigzag", "striped", "balanced"]


def plan_of(layout: Any, ranks: int) -> GlobalPlan:
    if layout == "balanced":
        made = balanced_layout([[700, 1203, 64, 3036]], ranks, mask=causal())
        return GlobalPlan(made, causal(), ranks, made.seq_local, q_shards=ranks, k_shards=ranks)
    local = padded_local(layout, ranks, LENGTH)
    return GlobalPlan(layout, causal(), ranks, local, length=LENGTH, q_shards=ranks, k_shards=ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_each_rank_computes_whole_tiles_that_hold_all_its_tokens(layout, ranks):
    plan = plan_of(layout, ranks)
    own = plan.own_queries
    assert own is not None and own.slot % TILE == 0
    for rank, runs in enumerate(own.runs):
        held = np.zeros(LENGTH, bool)
        for number, (base, n, start, stride) in enumerate(runs):
            assert (base, start % TILE, stride) == (number * own.slot, 0, 1)
            assert n <= own.slot
            assert (start + n) % TILE == 0 or start + n in (0, LENGTH)
            held[start : start + n] = True
        places = plan.q_places[rank]
        assert held[places[places < LENGTH]].all()
        if layout in ("contiguous", "zigzag"):
            assert own.slot * len(runs) <= plan.seq_local + 2 * len(runs) * TILE


def test_a_sequence_of_whole_tiles_on_one_rank_is_computed_as_it_is():
    plan = GlobalPlan("zigzag", causal(), 1, 4096, q_shards=1, k_shards=1)
    assert plan.own_queries is None
    assert plan.own_keys is None


def launches(ranks: int, layout: str, backend: str, dim: int) -> list[Launch]:
    q, kv = ((1, 8192 // ranks, heads, dim) for heads in (32, 8))
    options = Options(layout=layout, order="global", backend=backend)
    problem = Problem(q, kv, kv, ("bfloat16",) * 3, "cuda", ranks, options, capability=90, framework="torch")  # type: ignore
    call = call_of(problem, backend)
    return [*steps.of_forward(call, 1), *steps.of_backward(call, 1)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_kernels_and_tiles_do_not_depend_on_the_ranks(backend, dim):
    def shape(launch: Launch) -> Any:
        constants = {name: x for name, x in launch.constants if name not in ("Q_RUNS", "K_RUNS")}
        return launch.kernel, constants, [name for name, _ in launch.arguments], launch.warps, launch.stages

    one = [shape(each) for each in launches(1, "zigzag", backend, dim)]
    assert "hopper_backward" not in [kernel for kernel, *_ in one], "one pass adds to dq in the order of its programs"
    for ranks, layout in ((2, "zigzag"), (4, "contiguous"), (8, "zigzag"), (8, "striped")):
        assert [shape(each) for each in launches(ranks, layout, backend, dim)] == one


@pytest.mark.parametrize(
    ("order", "length", "dtype", "message"),
    [
        ("ring", 9, "float32", 'length=9 goes with order="global": leave it out'),
        ("global", None, "float32", r'order="global" needs length, .* an int of at least 8, .* got None'),
        ("global", 7, "float32", "an int of at least 8, .* got 7"),
        ("global", 9, "float8_e4m3fn", "a float8 cache rounds keys and values, so prefill cannot keep"),
    ],
)
def test_a_prefill_that_cannot_keep_the_order_is_refused(order, length, dtype, message):
    spec = CacheSpec.of(CacheSizes(1, 2, 16), 1, 8, 1, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        check_whole(spec, order, length, 8)
