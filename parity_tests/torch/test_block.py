"""Blocks merged are the whole: attend_block and merge against float64, on runs of every stride, gradients through both."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from ring_attn_core import Run, full
from ring_attn_torch import attend_block


@pytest.mark.parametrize("wrong", [[5, 2], [-1, 3], [3, 2**30 + 1]], ids=["reversed", "negative", "too far"])
def test_wrong_extents_are_found_in_a_block_too(wrong):
    q, extents = torch.randn(1, 8, 2, 4), torch.tensor([[0, 8]] * 8)[None]
    extents[0, 6] = torch.tensor(wrong)
    with pytest.raises(ValueError, match=r"extents must be 0 <= first <= end .* for the query at position 16 of batch row 0"):
        attend_block(q, q, q, extents=extents, q_run=Run(10, 8), k_run=Run(0, 8), mask=full())
    with pytest.raises(ValueError, match=r"key_extents must be 0 <= first <= end .* for the key at position 16 of batch row 0"):
        attend_block(q, q, q, key_extents=extents, q_run=Run(0, 8), k_run=Run(10, 8), mask=full())


def test_a_block_elsewhere_compiles_nothing_anew():
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    counter = CompileCounter()
    compiled = torch.compile(lambda start: attend_block(q, k, v, q_run=Run(start, 8))[0], backend=counter, fullgraph=True)
    for start in (3, 4, 5, 6):
        torch.testing.assert_close(compiled(start), attend_block(q, k, v, q_run=Run(start, 8))[0])
    assert counter.frame_count <= 2, "once for the first start, once for any"


def test_a_second_derivative_raises():
    q = torch.randn(1, 4, 1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(attend_block(q, q.detach(), q.detach())[0].sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()
