"""The plan of "direct" in a balanced layout against brute force: which keys travel, from whom, and which extents fit them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.plan.needed import NeededPlan, check_available
from ring_attn_core.runs import Band

from ..support.balanced import APART, DISORDERED, DOCUMENTS

MASKS = causal(), full(), sliding_window(4), sliding_window(0, 3)


def plan_of(documents: tuple[int, ...], ranks: int, more: int, mask: Band, by_documents: bool = True) -> NeededPlan:
    length = sum(documents)
    layout = balanced_layout(documents, ranks, seq_local=-(-length // ranks) + more, mask=mask)
    return NeededPlan(layout, mask, ranks, layout.seq_local, by_documents=by_documents)


def visible(plan: NeededPlan, documents: tuple[int, ...]) -> np.ndarray:
    """Return bool [length, length]: which key each query sees, by its document and the mask."""
    owner, at = np.repeat(np.arange(len(documents)), documents), np.arange(sum(documents))
    lag = at[:, None] - at
    low = -np.inf if plan.mask.lo is None else plan.mask.lo
    high = np.inf if plan.mask.hi is None else plan.mask.hi
    return (owner[:, None] == owner) & (low <= lag) & (lag <= high)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=9).map(tuple),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from(MASKS),
    st.booleans(),
)
def test_a_rank_receives_each_key_of_others_that_it_sees_once_and_no_other(documents, ranks, more, mask, by_documents):
    plan = plan_of(documents, ranks, more, mask, by_documents)
    sees = visible(plan, documents if by_documents else (sum(documents),))
    held = [np.array([p for p in plan.positions(rank) if p < plan.length], int) for rank in range(ranks)]
    for reader in range(ranks):
        received = plan.received(reader)
        found = [position for each in received for position in range(each.start, each.start + each.length)]
        assert found == sorted(set(np.flatnonzero(sees[held[reader]].any(0))) - set(held[reader]))
        attended = len(held[reader]) + len(found)
        assert plan.capacity(reader) == plan.kv_local or 0 <= plan.capacity(reader) - attended <= -(-plan.kv_local // 8)
        for each in received:
            at = plan.positions(each.owner)[each.first : each.first + each.length]
            assert at == list(range(each.start, each.start + each.length))
    assert sum(plan.tokens(owner, reader) for owner in range(ranks) for reader in range(ranks)) == sum(
        each.length for reader in range(ranks) for each in plan.received(reader)
    )


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_rows_of_the_step_show_own_and_received_keys_as_the_mask_does(mask):
    plan = plan_of(DOCUMENTS, 4, 1, mask)
    for rank in range(4):
        own = [position for position in plan.positions(rank) if position < plan.length]
        received = [position for each in plan.received(rank) for position in range(each.start, each.start + each.length)]
        keys = sorted([*own, *received])
        assert plan.area(rank, 0) == visible(plan, (sum(DOCUMENTS),))[own][:, keys].sum()
        runs = [(row.k_base, row.k_start, row.k_len) for row in plan.rows(rank, 0)[0] if row.k_len]
        assert [start + i for _, start, length in runs for i in range(length)] == keys
        assert [base + i for base, _, length in runs for i in range(length)] == [*range(len(keys))]
        of_ranks = {each.start + i: each for _, each in plan.places(rank) for i in range(each.length)}
        assert sorted(of_ranks) == keys and [at for at in keys if of_ranks[at].owner == rank] == own


@pytest.mark.parametrize("layout", [DISORDERED, APART], ids=str)
def test_rows_of_the_step_have_the_keys_of_a_layout_whose_runs_are_not_in_order(layout):
    plan = NeededPlan(layout, causal(), layout.ranks, layout.seq_local, by_documents=True)
    for rank in range(layout.ranks):
        own = [position for position in plan.positions(rank) if position < plan.length]
        arrive = [position for each in plan.received(rank) for position in range(each.start, each.start + each.length)]
        at = {row.k_base + i: row.k_start + i for row in plan.rows(rank, 0)[0] for i in range(row.k_len)}
        keys = [at[index] for index in sorted(at)]
        assert keys == (sorted([*own, *arrive]) if plan.exchanges else own)


def test_the_runs_of_many_ranks_are_computed_in_time_that_grows_with_their_number():
    """The plan of each batch is computed on the host, so a pass over all runs for each rank would delay the GPUs."""
    plan = plan_of((3500,) * 220, 256, 0, causal())
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count)
    try:
        runs = plan.k_runs
    finally:
        sys.setprofile(None)
    assert steps < 100 * sum(map(len, runs))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_extents_that_reach_no_further_than_their_document_fit(mask):
    plan, ends = plan_of(DOCUMENTS, 4, 2, mask), np.cumsum(DOCUMENTS)
    own = np.stack([np.repeat(ends - DOCUMENTS, DOCUMENTS), np.repeat(ends, DOCUMENTS)], -1)
    own = np.concatenate([own, np.zeros((plan.ranks * plan.seq_local - len(own), 2), int)])
    for rank in range(4):
        check_available(own[plan.positions(rank)][None], plan, rank)


def test_an_extent_beyond_its_document_is_named_with_its_query():
    plan = plan_of((16, 16, 16, 16), 4, 0, causal())
    rank = next(rank for rank in range(4) if 47 in plan.positions(rank))
    extents = np.zeros((1, 16, 2), int)
    extents[0, plan.positions(rank).index(47)] = 0, 64
    with pytest.raises(ValueError, match="the query at position 47 of row 0 has extent \\[0, 64\\], which reaches beyond them"):
        check_available(extents, plan, rank)


def test_documents_on_one_rank_each_cost_nothing():
    plan = plan_of((16, 16, 16, 16), 4, 0, causal())
    assert not plan.exchanges and [plan.capacity(rank) for rank in range(4)] == [plan.kv_local] * 4


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9).map(tuple), st.integers(1, 8), st.sampled_from(MASKS))
def test_the_busiest_rank_is_the_one_that_receives_or_sends_most(documents, ranks, mask):
    plan = plan_of(documents, ranks, 1, mask)
    tokens = np.array([[plan.tokens(owner, reader) for reader in range(ranks)] for owner in range(ranks)])
    assert plan.busiest() == max(tokens.sum(0).max(), tokens.sum(1).max())
    assert plan.busiest(even=True) == (ranks - 1) * plan.most_tokens >= plan.busiest()
    assert sum(map(plan.pairs, range(ranks))) == visible(plan, documents).sum()
