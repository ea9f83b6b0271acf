"""Shards made for another ring, or in another order than their extents: what the numbers of a call show."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ring_attn_core import LAYOUTS, RingPlan, causal
from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_core.data.layout_check import check_labels, check_order, where_held
from ring_attn_core.layouts import ShardLength, gathered_length, plain_length
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

TREE = balanced_tree_layout([-1, 0, 0], [8, 14, 10], 4)


def problem(local: int, ranks: int, kv_local: int | None = None, **options: Any) -> Problem:
    k = (1, local if kv_local is None else kv_local, 4, 8)
    return Problem((1, local, 4, 8), k, k, ("float32", "float32", "float32"), "cpu", ranks, Options(**options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_may_be_padded_to_any_size(layout):
    for local, length in ((20, 64), (20, 50), (18, 50), (16, 0), (2, 1), (16, 32), (16, 16), (16, None)):
        assert problem(local, 4, layout=layout, length=length).check().seq_local == local
        problem(local, 4, kv_local=16, layout=layout, length=length, kv_length=32).check()


def test_the_layout_of_a_tree_needs_its_key_extents():
    call = problem(8, 4, layout=TREE)
    with pytest.raises(
        ValueError, match=r"made for prefix trees, and without key_extents .*: pass key_extents=shard.key_extents"
    ):
        call.check()
    replace(call, arrays=(OptionalArray("key_extents", (1, 8, 2), "int32"),)).check()
    problem(8, 4, layout=BalancedLayout(TREE.runs, TREE.length)).check()
    assert Options.read(call.options.text, call.options.counts) == call.options


def test_a_length_knows_its_shard_and_is_a_plain_int_otherwise():
    made = ShardLength(64, "zigzag", 4)
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (same, same.layout, same.ranks) == (made, "zigzag", 4)
    assert made == 64
    assert {made: 1}[64] == 1  # type: ignore[index]
    assert made != ShardLength(64, "zigzag", 8)
    assert made != ShardLength(64, "striped", 4)
    assert made != ShardLength(63, "zigzag", 4)
    assert type(plain_length(made, "zigzag", 4)) is int
    assert plain_length(ShardLength(64, "zigzag", 1), "striped", 1) == 64
    assert plain_length(64, "striped", 3) == 64


@pytest.mark.parametrize(("layout", "ranks"), [("zigzag", 2), ("striped", 4), (TREE, 4)])
def test_a_length_of_another_ring_or_layout_is_refused(layout, ranks):
    made = ShardLength(32, "zigzag", 4)
    for call in (
        lambda: Options(layout=layout, length=made).in_ring(ranks),
        lambda: Options(layout=layout, kv_length=made).in_ring(ranks),
        lambda: gathered_length((1, 32 // ranks), layout, ranks, made),
    ):
        with pytest.raises(ValueError, match="these shards were made for 4 ranks in the layout zigzag, and this ring has"):
            call()
    options = Options(length=made).in_ring(4)
    assert (type(options.length), options.length) == (int, 32)


def orders(extents: np.ndarray, plan: RingPlan) -> list[tuple[bool, bool]]:
    """Say where the extents of each rank fit, with each shard next to the one of the rank before."""
    shards = np.split(extents, plan.ranks, 1)
    return [where_held(shard, plan.q_runs[rank], rank * plan.seq_local) for rank, shard in enumerate(shards)]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("kind", ["documents", "prefix", "padding"])
def test_extents_in_natural_order_are_told_from_those_in_the_layout(layout, kind):
    plan, at = RingPlan(layout, causal(), ranks=4, seq_local=16, length=61), np.arange(64)
    first, end = {
        "documents": (at // 7 * 7, at // 7 * 7 + 7),
        "prefix": (0 * at, np.maximum(20, at + 1)),
        "padding": (np.full(64, 20), np.where(at < 20, 20, 64)),
    }[kind]
    whole = np.stack([first, end], -1)[None]
    order = [position for rank in range(4) for position in plan.positions(rank)]
    check_order("extents", orders(whole[:, order], plan))
    with pytest.raises(ValueError, match=r"extents lie in natural order.*to_layout\(extents, layout, ranks\)"):
        check_order("extents", orders(whole, plan))


def test_extents_that_leave_out_their_own_query_pass():
    plan = RingPlan("zigzag", causal(), ranks=4, seq_local=16)
    memory = np.broadcast_to(np.array([0, 20]), (1, 64, 2))
    check_order("extents", orders(memory, plan))
    check_order("extents", [None, None])


def test_labels_that_cross_the_ends_of_documents_are_refused():
    ids = np.arange(1, 25).reshape(2, 12)
    documents = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, -1, -1], [0] * 6 + [1] * 6])
    labels = np.roll(ids, -1, 1)
    with pytest.raises(
        ValueError, match="the label of token 2 of row 0, the last of its document, is the first token of the next"
    ):
        check_labels(labels, ids, documents)
    right, alike = labels.copy(), np.where(np.isin(ids, (4, 6, 19)), 9, ids)
    right[0, 2] = -100
    check_labels(right, ids, documents)
    check_labels(None, ids, documents)
    check_labels(np.roll(alike, -1, 1), alike, documents)  # a token that ends a document may begin the next
