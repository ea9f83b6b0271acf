"""``order="global"`` of PyTorch: the same bits on any number of ranks and in any layout, on gloo."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ring_attn_torch import ring_attention

from ..support.cases import Case
from ..support.orders import BALANCED, BALANCED_RINGS, MORE_RINGS, ORDERED, TWO_FEATURES, check_bits, check_other_documents
from ..support.selection import one_in
from ..support.spawn import PerRank
from .ring import on_rank, run
from .test_strategies import under_compile


@pytest.mark.parametrize("case", ORDERED.values(), ids=ORDERED)
def test_results_have_the_same_bits_on_1_2_3_and_4_ranks(gloo, case):
    check_bits(case, partial(run, gloo))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ORDERED.values(), ids=ORDERED)
def test_results_have_the_same_bits_on_up_to_8_ranks_in_every_layout(gloo, case):
    check_bits(case, partial(run, gloo), MORE_RINGS)


@pytest.mark.parametrize("case", one_in(8, TWO_FEATURES), ids=str)
def test_any_two_features_together_have_the_same_bits_on_every_ring(gloo, case):
    check_bits(case, partial(run, gloo))


def test_balanced_layouts_have_the_bits_of_one_rank(gloo):
    check_bits(BALANCED, partial(run, gloo), BALANCED_RINGS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compiled_call_keeps_the_order(gloo, ranks):
    case = Case(order="global", sinks=True, extents="documents", ranks=ranks)
    inputs = [PerRank(*x) for x in case.inputs()]
    for compiled, eager in zip(gloo(ranks, under_compile, case, *inputs), gloo(ranks, on_rank, case, *inputs), strict=True):
        for a, b in zip(compiled, eager, strict=True):
            assert a.tobytes() == b.tobytes()


def test_one_rank_needs_no_group():
    q, k = torch.randn(1, 10, 4, 8), torch.randn(1, 10, 2, 8)
    expected = ring_attention(q, k, k)
    torch.testing.assert_close(ring_attention(q, k, k, order="global"), expected)


def other_orders(group, *arguments):
    q = torch.randn(1, 8, 2, 4)
    return ring_attention(q, q, q, group=group, order=arguments[0])


def test_ranks_with_other_orders_are_told_so(gloo):
    for error in gloo.outcomes(2, other_orders, PerRank("ring", "global")):
        assert isinstance(error, ValueError)
        assert "disagree on order: 'ring' on rank 0, 'global' on rank 1" in str(error)


def test_other_documents_of_the_row_change_no_bit(gloo):
    check_other_documents(partial(run, gloo), ranks=3, layout="zigzag")
