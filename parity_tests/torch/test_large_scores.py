"""Large and nearly equal scores: the PyTorch ring is as exact as one rank, because the state has the rest of a rounded lse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn_core import full
from ring_attn_torch import ring_attention
from ring_attn_torch.call import autograd
from ring_attn_torch.layers.recompute import recompute

from ..support.large_scores import large


def gradients(call: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the out of ``call(q, k, v)`` and the gradients under a cotangent, on large scores on one rank."""
    case = large(1e6, 1, True)
    q, k, v, dout = (torch.from_numpy(case.arrays[name]).to(dtype) for name in ("q", "k", "v", "dout"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ring_attention(q, k, v, layout="contiguous", mask=full(), scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "call",
    [torch.compile(attend, fullgraph=True, backend="aot_eager"), lambda *qkv: recompute(attend, *qkv)],
    ids=["torch.compile", "recomputed"],
)
def test_an_op_and_a_recomputation_keep_the_bits_of_an_eager_call(call, dtype):
    for eager, other in zip(gradients(attend, dtype), gradients(call, dtype), strict=True):
        assert torch.equal(eager, other)


@pytest.mark.parametrize(("dtype", "rest"), [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True)], ids=str)
def test_only_inputs_as_precise_as_the_state_have_a_rest(dtype, rest):
    q = torch.randn(1, 8, 2, 8).to(dtype)
    options = autograd.Options(layout="contiguous", mask=full())
    state = autograd.forward(q, q, q, autograd.Arrays(), autograd.OpCall(options), ahead=False)
    assert (state.rest is not None) == rest
