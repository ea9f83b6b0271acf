"""The strategy "direct" of JAX in a balanced layout: exact, what it sends, and NaN or an error for keys that were not sent."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.plan.needed import NeededPlan
from ring_attn_core.problem.traffic import traffic
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_jax import sharded_ring_attention, to_layout
from ring_attn_jax.attend.keys import Keys
from ring_attn_jax.ring.strategies.needed import gradients_home, with_received

from ..support.balanced import AUTO_CASES, DIRECT_CASES, DISORDERED_CASES, DOCUMENTS, direct_case
from ..support.cases import Case, check, computed_bound
from ..support.selection import first
from ..support.strategies import problem_of
from .ring import SEQ, mesh_of, run
from .test_strategies import arrays, gradients, traced_bytes


@pytest.mark.slow
@pytest.mark.parametrize("case", first(DIRECT_CASES, 1, 6), ids=str)
def test_needed_keys_are_exact_with_every_feature(case):
    check(case, run.__wrapped__(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", first(DISORDERED_CASES), ids=str)
def test_needed_keys_are_exact_if_runs_are_not_in_order_of_position(case):
    check(case, run.__wrapped__(case))


@pytest.mark.parametrize("case", first(DIRECT_CASES, 3), ids=str)
def test_bytes_are_the_plans(case):
    """Each rank sends all others equally many keys, which are more than those that they need."""
    with jax.enable_x64(case.dtype == "float64"):
        counted = traced_bytes(case)
    for rank, mine in enumerate(counted):
        ours, theirs = (sum(x.bytes for x in traffic(problem_of(case, name), rank)) for name in ("jax", "torch"))
        assert mine == ours >= theirs
        assert (mine > theirs) == (problem_of(case, "jax").strategy == "direct")


@pytest.mark.parametrize("case", AUTO_CASES[1:], ids=str)
def test_auto_takes_direct_only_where_no_extents_decide_what_travels(case):
    """The bytes of either are those of test_bytes_are_the_plans, and its results exact."""
    by_mask = case in AUTO_CASES[3:]
    assert traced_bytes(case) == traced_bytes(replace(case, strategy="direct" if by_mask else "ring"))
    assert problem_of(case, "jax").strategy == ("direct" if by_mask else "ring")


def test_documents_that_each_lie_on_one_rank_send_nothing_and_are_exact():
    documents = (9, 9, 9, 9)
    extents = np.repeat([[[0, 9], [9, 18], [18, 27], [27, 36]]], 9, 1).astype(np.int32)
    case = Case(balanced_layout(documents, 4), length=36, batch=1, extents="documents", strategy="direct").given(extents=extents)
    assert traced_bytes(case) == [0, 0, 0, 0]
    check(case, run.__wrapped__(case))
    beyond = extents - (extents > 9)  # the third and fourth documents, whose queries also see the end of the one before
    out = run.__wrapped__(case.given(extents=beyond)).out
    np.testing.assert_array_equal(np.isnan(out).any((0, 2, 3)), np.arange(36) >= 18)


def wrong(case: Case) -> np.ndarray:
    """Return extents of which every third begins earlier, and every other one ends later, than the query's document."""
    extents, rng = case.features["extents"].copy(), np.random.default_rng(5)
    extents[:, ::3, 0] -= rng.integers(1, 20, extents[:, ::3, 0].shape, extents.dtype)
    extents[:, ::2, 1] += rng.integers(1, 20, extents[:, ::2, 1].shape, extents.dtype)
    return np.clip(extents, 0, case.length)


@pytest.mark.parametrize("mask", first([causal(), sliding_window(6), full()], 1, 2), ids=str)
def test_queries_that_may_see_keys_that_did_not_travel_are_nan_and_all_others_exact(mask):
    case = direct_case(4, mask=mask)  # the first of DIRECT_CASES, which is compiled already
    steps, length = problem_of(case, "jax").steps, case.length
    assert isinstance(steps, NeededPlan)
    needed, outside = case.visible, np.zeros((case.batch, length), bool)
    case = case.given(extents=wrong(case))
    for rank in range(case.ranks):
        own = [position for position in steps.positions(rank) if position < length]
        there = needed[:, own].any((0, 1))
        there[own] = True
        outside[:, own] = (case.visible[:, own] & ~there).any(2)
    out = run.__wrapped__(case).out[:, :length]
    assert 0 < outside.mean() < 1
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(outside[..., None, None], out.shape))
    zero = lambda x: np.where(outside[..., None, None], 0, x)
    assert relative_error(zero(out), zero(case.expected.out)) <= computed_bound(case, "out")


@cache
def direct() -> Any:
    """Return a function of q, also taken as k and v, and of extents. All tests share it, so that it is compiled once."""
    call = partial(sharded_ring_attention, mesh=mesh_of(4), layout=balanced_layout(DOCUMENTS, 4), strategy="direct")
    return lambda q, extents: call(q, q, q, extents=extents, length=sum(DOCUMENTS))


@pytest.mark.parametrize("begin", first([5, 0]))
def test_extents_that_can_be_read_are_refused_if_they_reach_beyond_the_documents(begin):
    """And traced ones give NaN. The query at position 6, of the document 6 .. 17, sees a key that its rank does not have."""
    layout, extents = balanced_layout(DOCUMENTS, 4), direct_case(4).features["extents"].copy()
    extents[1, 6] = begin, 18
    q = jnp.ones((2, 4 * layout.seq_local, 1, 8))
    placed = to_layout(jnp.asarray(extents), layout, 4)
    message = f"the query at position 6 of row 1 has extent [{begin}, 18], which reaches beyond them: pass the extents"
    with pytest.raises(ValueError, match=re.escape(message)):
        direct()(q, placed)
    out = jax.jit(direct())(q, placed)
    assert jnp.isnan(out).any((1, 2, 3)).tolist() == [False, True]


def test_the_owner_adds_the_gradients_of_the_ranks_after_it_in_their_order():
    plan = NeededPlan(balanced_layout((32,), 4, mask=full()), full(), 4, 8)
    gradient = np.array([2**24, 1, -(2**24), 3], np.float32)  # each rank's, for every key that it receives

    def home(own: jax.Array, mine: jax.Array) -> jax.Array:
        keys = with_received(Keys(own), plan, "seq").kv
        return gradients_home(jnp.where(keys == lax.axis_index("seq") + 1, 0, mine), plan, "seq")

    kv = jnp.zeros((1, 32, 1, 2)) + jnp.repeat(jnp.arange(1.0, 5), 8)[None, :, None, None]
    of_ranks = jax.jit(jax.shard_map(home, mesh=mesh_of(4), in_specs=(SEQ, SEQ), out_specs=SEQ))(kv, gradient[None])
    sums = [(gradient[(r + 1) % 4] + gradient[(r + 2) % 4]) + gradient[(r + 3) % 4] for r in range(4)]
    backwards = [(gradient[(r + 3) % 4] + gradient[(r + 2) % 4]) + gradient[(r + 1) % 4] for r in range(4)]
    assert sums != backwards
    np.testing.assert_array_equal(np.asarray(of_ranks)[0, :, 0, 0], np.repeat(sums, 8))


def test_there_is_one_exchange_a_pass_and_one_for_gradients():
    layout = balanced_layout((16,), 8)
    ring = partial(sharded_ring_attention, mesh=mesh_of(8), layout=layout, strategy="direct")
    text = gradients(ring).lower(*arrays()).as_text()
    assert text.count("stablehlo.all_to_all") == 1 + 1 + 1, "keys, keys again, and gradients"
    assert "collective_permute" not in text and "all_gather" not in text
