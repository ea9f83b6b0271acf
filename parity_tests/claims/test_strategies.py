"""The strategies of both packages: exact, the same as one another, and JAX = PyTorch in float32 to 1e-6."""

# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from ring_attn_core import Gather, Ulysses
from ring_attn_core.reference.tolerance import relative_error

from ..core.test_order import LAYOUTS, plan_of
from ..support.balanced import DIRECT_CASES
from ..support.cases import Case, check, check_future_unseen, check_same
from ..support.models import assert_near, layer_data, layer_weights
from ..support.selection import first, in_each, one_in, one_of_each
from ..support.strategies import BY_HEADS, COMBINED, EACH, ONE_EACH, PAIRS, SHARED, SLICED, STRATEGIES
from .framework import check_agree

COARSE = (8, 6)
"""Tiles that a slot fills once or twice: tests of the ring have smaller ones, which take PyTorch three times as long."""

OTHERS = [case for case in EACH if case not in ONE_EACH]
LAST_FIRST = [*reversed(STRATEGIES.values())]


def test_a_batch_without_rows_may_have_a_key_mask_under_gather(framework):
    case = Case(batch=0, key_mask="random", strategy="gather")
    check(case, framework.attention(case))


@in_each("case", jax=first(PAIRS, 0, 4), torch=one_of_each(4, PAIRS))
@pytest.mark.slow
def test_every_strategy_is_exact_with_every_feature(framework, case):
    check(case, framework.attention(replace(case, tiles=COARSE), once=True))


@in_each("case", jax=first(COMBINED, 0, 0), torch=one_in(16, COMBINED))
def test_any_two_features_together_are_exact_under_every_strategy(framework, case):
    check(case, framework.attention(replace(case, tiles=COARSE), once=True))


@in_each("case", jax=first([*ONE_EACH, *OTHERS], 1, 5), torch=one_of_each(6, EACH), slow="jax")
def test_every_feature_at_once_is_exact_and_hides_nan(framework, case):
    case = replace(case, tiles=COARSE)
    clean = framework.attention(case)
    check(case, clean)
    check_same(framework.attention(replace(case, poison=True)), clean)


@in_each("case", jax=first([SLICED[i] for i in (0, 2, 3, 1, 4)], 1, 3), torch=first(SLICED, 3), slow="jax")
def test_slices_of_shards_are_exact_with_every_feature(framework, case):
    check(case, framework.attention(case, once=True))


@in_each("case", jax=first([SHARED[i] for i in (1, 0, 3, 2, 4)], 0, 3), torch=SHARED, slow="jax")
def test_key_heads_that_ranks_share_are_exact(framework, case):
    check(case, framework.attention(case))


@in_each("case", jax=first(BY_HEADS, 1), torch=first(BY_HEADS, len(BY_HEADS) - 1), slow="jax")
def test_groups_of_heads_are_exact_with_every_feature(framework, case):
    check(case, framework.attention(case))


@in_each("groups", jax=first([4, 2], 0), torch=[2, 4])
def test_groups_of_heads_change_no_bit_where_tiles_fill_the_vectors_of_a_cpu(framework, groups):
    """In JAX dq and dk pass through a matrix product that XLA compiles by the number of its heads."""
    case = Case(heads=8, kv_heads=4, length=128, tiles=(16, 16), alibi=True, sinks=True, dropout_rate=0.3, key_mask="random")
    whole, parts = (framework.attention(replace(case, strategy=each)) for each in ("gather", Gather(groups=groups)))
    for name in ("out", "lse", "dv", *(("dq", "dk") if framework.name == "torch" else ())):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name), err_msg=name)


@in_each("strategy", jax=first(LAST_FIRST, 0, 2), torch=LAST_FIRST, slow="jax")
def test_future_tokens_change_nothing_on_any_rank(framework, strategy):
    case = Case("striped", strategy=strategy)
    after = framework.attention(case.with_other_future(20), anew=True)
    check_future_unseen(framework.attention(case), after, 20, case.length)


def variants(dilated: Any, summary: Any, q: Any, k: Any, v: Any, pool: Any, **ring: Any) -> tuple[Any, Any]:
    dilated_out = dilated(q, k, v, segments=(16, 32), dilations=(1, 2), **ring)
    return dilated_out, summary(q, k, v, pool, block=4, window=6, **ring)


@in_each("strategy", jax=first(LAST_FIRST, 0, 3), torch=one_of_each(2, LAST_FIRST))
def test_variants_are_the_same_under_every_strategy(framework, strategy):
    for mine, theirs in zip(results_of_variants(framework, strategy), results_of_variants(framework, "ring"), strict=True):
        assert relative_error(mine, theirs) <= 1e-12


@cache
def results_of_variants(framework: Any, strategy: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    q, k, v, *douts = (rng.standard_normal((1, 32, heads, 8)) for heads in (8, 4, 4, 8, 8))
    both = framework.dilated_attention, framework.summary_attention
    call = partial(variants, *(partial(function, strategy=strategy) for function in both))
    got, gradients = framework.over_ring(4, call, [q, k, v], [np.ones((1, 4, 8))], douts)
    return [*got, *gradients]


@in_each("strategy", jax=first(LAST_FIRST, 0, 1), torch=one_of_each(2, LAST_FIRST))
def test_a_layer_is_the_same_under_every_strategy(framework, strategy):
    call = lambda strategy: framework.layer(layer_weights(), *layer_data(), 4, {"strategy": strategy})
    assert_near(call(strategy), call("ring"), 2e-6)


def test_one_rank_computes_as_ever(framework):
    q, k, v = (framework.array(x) for x in np.random.default_rng(0).standard_normal((3, 2, 6, 4, 8), np.float32))
    attend = framework.alone("ring_attention")
    for strategy in ("gather", "ulysses", Ulysses(ranks=1), Gather(groups=4)):
        assert (attend(q, k, v, strategy=strategy) == attend(q, k, v)).all()


@pytest.mark.parametrize(
    ("strategy", "ranks", "message"),
    [
        ("ulysses", 3, "strategy='ulysses' cannot run this: 4 query heads cannot be dealt evenly to 3 ranks"),
        ("ulysses", 8, "strategy='ulysses' cannot run this: 4 query heads cannot be dealt evenly to 8 ranks"),
        (Ulysses(ranks=2), 3, r"strategy=Ulysses\(ranks=2\) cannot run this: groups of 2 ranks do not divide a ring of 3"),
        (Ulysses(ranks=8), 8, r"strategy=Ulysses\(ranks=8\) cannot run this: 4 query heads cannot be dealt evenly to 8 ranks"),
        (
            Gather(groups=3),
            2,
            r"strategy=Gather\(groups=3\) cannot run this: 2 key heads cannot be cut into 3 .*groups; Gather",
        ),
        (Gather(groups=4), 2, r"strategy=Gather\(groups=4\) cannot run this: 2 key heads cannot be cut into 4 equal groups"),
        ("telepathy", 2, "unknown strategy 'telepathy'"),
    ],
)
def test_a_strategy_that_cannot_run_a_call_is_refused_alike_on_every_rank(framework, strategy, ranks, message):
    q, k = (np.ones((2, 8 * ranks, heads, 8), np.float32) for heads in (4, 2))
    framework.refuses(message + ".*auto", ranks, partial(framework.ring_attention, strategy=strategy), q, k, k)


AGREED = [replace(case, dtype="float32", tiles=COARSE) for case in (*ONE_EACH, *EACH, *PAIRS)]
AGREED[len(ONE_EACH) : len(ONE_EACH)] = (replace(case, dtype="float32") for case in SHARED)


@pytest.mark.parametrize("case", first(dict.fromkeys(AGREED), 0, 6), ids=str)
def test_frameworks_agree_under_every_strategy(frameworks, case, record_property):
    record_property("worst", check_agree(case, *(each.attention(case) for each in frameworks)))


@pytest.mark.parametrize("case", first([case for case in DIRECT_CASES if case.dtype == "float32"], 0, 1), ids=str)
def test_frameworks_agree_on_needed_keys(frameworks, case, record_property):
    record_property("worst", check_agree(case, *(each.attention(case) for each in frameworks)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_of_both_frameworks_compute_the_same_tiles_in_global_order(frameworks, layout):
    import jax.numpy as jnp
    import torch

    from ring_attn_jax.ring.strategies import global_order as in_jax
    from ring_attn_torch.ring.strategies import global_order as in_torch

    plan = plan_of(layout, 3)
    for own, slot in ((plan.own_queries, plan.q_slot), (plan.own_keys, plan.k_slot)):
        assert own is not None
        for rank in range(3):
            ours, theirs = in_jax.own_tiles(own, jnp.int32(rank), slot), in_torch.own_tiles(own, rank, slot, torch.device("cpu"))
            order, places = theirs.order.numpy(), theirs.places.numpy()
            np.testing.assert_array_equal(np.minimum(ours.order, slot - 1), order)
            np.testing.assert_array_equal(ours.rows, np.array(theirs.rows))
            for _, n, start, _ in own.runs[rank]:
                held = np.arange(start, start + n)
                np.testing.assert_array_equal(order[places[held]], held)
                np.testing.assert_array_equal(order[np.asarray(ours.places)[held]], held)
