"""Who computes which pass is decided when the pass comes, and once."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from ring_attn_torch import ring_attention
from ring_attn_torch.call import prepare


@pytest.mark.parametrize(
    ("backend", "asked"),
    [("auto", [("forward",), ("backward",)]), ("blockwise", [("forward", "backward")])],
    ids=["auto", "by name"],
)
def test_auto_decides_about_the_backward_when_it_comes_and_a_name_is_checked_for_both_at_once(backend, asked):
    q, k, v = (torch.randn(1, 26, 2, 8, requires_grad=True) for _ in range(3))
    passes: list[tuple[str, ...]] = []

    def runnable(problem, anywhere, of):
        passes.append(tuple(of))

    for cached in (prepare.checked, prepare.checked_backward):
        cached.cache_clear()
    with patch.object(prepare, "runnable", runnable):
        out = ring_attention(q, k, v, backend=backend)
        assert passes == asked[:1]
        for _ in range(2):
            torch.autograd.grad(ring_attention(q, k, v, backend=backend), (q, k, v), torch.ones_like(out))
    assert passes == asked
    for cached in (prepare.checked, prepare.checked_backward):
        cached.cache_clear()
