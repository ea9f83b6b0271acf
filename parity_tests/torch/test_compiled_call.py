"""Each pass of a call is compiled when it comes, and once."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from ring_attn_core import full
from ring_attn_torch import ring_attention
from ring_attn_torch.call import decide
from ring_attn_torch.ring import agreement


@pytest.fixture(autouse=True)
def forgotten():
    """Forget the decisions of rings of one before and after a test."""
    forget()
    yield
    forget()


def forget():
    decide.compile_call.cache_clear()
    agreement.ALONE.agreed.clear()


@pytest.mark.parametrize(
    ("backend", "asked"),
    [("auto", [("forward",), ("backward",)]), ("blockwise", [("forward", "backward")])],
    ids=["auto", "by name"],
)
def test_auto_compiles_the_backward_when_it_comes_and_a_name_compiles_both_at_once(backend, asked):
    q, k, v = (torch.randn(1, 26, 2, 8, requires_grad=True) for _ in range(3))
    passes: list[tuple[str, ...]] = []

    def runnable(problem, any_position, of):
        passes.append(tuple(of))

    with patch.object(decide, "runnable", runnable):
        out = ring_attention(q, k, v, backend=backend)
        assert passes == asked[:1]
        for _ in range(2):
            torch.autograd.grad(ring_attention(q, k, v, backend=backend), (q, k, v), torch.ones_like(out))
    assert passes == asked


def test_the_backward_begins_to_compile_at_the_first_call_that_records_one():
    """Before the forward is compiled, and also if calls without a gradient came before."""
    x, began = torch.randn(1, 30, 2, 8), []
    with (
        patch.object(decide, "begin_backward", lambda *_: began.append("backward")),
        patch.object(decide, "runnable", lambda *_: began.append("forward")),
    ):
        ring_attention(x, x, x)
        assert began == ["forward"]
        for _ in range(2):
            ring_attention(x.requires_grad_(), x, x)
        assert began == ["forward", "backward"]
        ring_attention(x, x, x, mask=full())
    assert began[2:] == ["backward", "forward"]
