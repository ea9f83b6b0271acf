"""Large and nearly equal scores: the PyTorch ring is as exact as one rank, because the state has the rest of a rounded lse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core import full
from ring_attn_torch import attend_block, ring_attention
from ring_attn_torch.call import autograd
from ring_attn_torch.layers.recompute import recomputed

from ..support.large_scores import SIZES, check_exact, check_no_ring_adds_errors, features_of, large
from ..support.strategies import STRATEGIES
from .ring import run


@pytest.mark.parametrize("spread", [False, True], ids=["equal", "spread"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_ring_is_as_exact_as_one_rank(gloo, size, spread):
    ranks = 1, 2, 4, 8
    check_no_ring_adds_errors([check_exact(case, run(gloo, case)) for case in (large(size, n, spread) for n in ranks)], ranks)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_every_strategy_is_as_exact(gloo, strategy):
    case = large(1e6, 4, True, strategy=strategy, layout="striped")
    check_exact(case, run(gloo, case))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_masks_sinks_and_dropout_are_as_exact(gloo, size):
    case = features_of(size, 4)
    check_exact(case, run(gloo, case))


def test_float64_is_as_exact(gloo):
    case = large(1e6, 4, True, dtype="float64")
    check_exact(case, run(gloo, case))


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
    [torch.compile(attend, fullgraph=True, backend="aot_eager"), lambda *qkv: recomputed(attend, *qkv)],
    ids=["torch.compile", "recomputed"],
)
def test_an_op_and_a_recomputation_keep_the_bits_of_an_eager_call(call, dtype):
    for eager, other in zip(gradients(attend, dtype), gradients(call, dtype), strict=True):
        assert torch.equal(eager, other)


def test_the_gradients_of_a_block_are_as_exact():
    block = lambda q, k, v: attend_block(q, k, v, mask=full(), scale=1.0)[0]
    whole = gradients(attend)
    for mine, exact in zip(gradients(block), whole, strict=True):
        np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize(("dtype", "rest"), [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True)], ids=str)
def test_only_inputs_as_precise_as_the_state_have_a_rest(dtype, rest):
    q = torch.randn(1, 8, 2, 8).to(dtype)
    options = autograd.Options(layout="contiguous", mask=full())
    state = autograd.forward(q, q, q, autograd.Arrays(), autograd.OpCall(options), ahead=False)
    assert (state.rest is not None) == rest
