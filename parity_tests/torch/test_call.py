"""Tests of a call of attention on one process: the values that it checks, keeps and hands on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ring_attn_torch.block as block
from ring_attn_core.problem.options import Options
from ring_attn_torch import attend_block, ring_attention
from ring_attn_torch.call import signature
from ring_attn_torch.call.autograd import Eager, OpCall
from ring_attn_torch.call.decide import check_intervals
from ring_attn_torch.call.prepare import Arrays, problem_of


def test_slopes_that_require_a_gradient_are_refused_after_others_were_taken():
    x, slopes = torch.randn(1, 6, 2, 8), torch.ones(2)
    ring_attention(x, x, x, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="alibi_slopes are constants, and these require a gradient"):
        ring_attention(x, x, x, alibi_slopes=slopes.requires_grad_())


@pytest.mark.parametrize("name", ["extents", "key_extents"])
def test_intervals_of_padding_are_not_looked_at_and_those_of_tokens_are(name):
    """Cut 10 tokens into shards of 6: the last rank holds 4 and 2 slots of padding."""
    x, intervals = torch.randn(1, 6, 2, 8), torch.tensor([[0, 10]] * 4 + [[5, 2]] * 2)[None]
    arrays = Arrays(**{name: intervals})
    plan = problem_of(x, x, x, arrays, 2, Options(layout="contiguous", length=10)).plan
    check_intervals(arrays, plan, 1)
    with pytest.raises(ValueError, match=rf"^{name} must be 0 <= first .* got \[5, 2\] for the (query|key) at position 4 "):
        check_intervals(arrays, plan, 0)


def test_the_rounding_error_of_lse_takes_no_gradient():
    q, k, v = torch.randn(3, 1, 6, 2, 8, requires_grad=True)
    out, lse, rest = Eager.apply(OpCall(Options()), None, q, k, v, *Arrays())
    assert (out.requires_grad, lse.requires_grad, rest.requires_grad) == (True, True, False)


@pytest.mark.parametrize(
    ("call", "module", "name"), [(ring_attention, signature, "attention"), (attend_block, block, "block_state")]
)
def test_a_backend_by_name_reads_values_as_an_array_where_a_gradient_is_wanted(monkeypatch, call, module, name):
    """Its backward would be checked for the values as columns of k, which no backward reads."""
    options: list[Any] = []
    inside = getattr(module, name)
    note = lambda *given: (options.extend(x for x in given if isinstance(x, Options)), inside(*given))[1]
    monkeypatch.setattr(module, name, note)
    q, k = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 1, 8)
    for backend in ("auto", "blockwise"):
        call(q, k, v_dim=4, backend=backend)
        call(q.requires_grad_(), k, v_dim=4, backend=backend)
        q = q.detach()
    assert [each.v_dim for each in options] == [4, 4, 4, None]
