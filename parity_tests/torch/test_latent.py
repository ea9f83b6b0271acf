"""Values that are columns of keys in PyTorch: to the bit those of a slice, on every backend, and k sent alone."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core import TwoLevel, Ulysses, full, sliding_window
from ring_attn_core.problem.traffic import traffic
from ring_attn_torch import ring_attention

from ..support.cases import Case
from ..support.selection import first
from ..support.spawn import PerRank
from ..support.strategies import STRATEGIES, fitted, problem_of
from .test_strategies import count

LATENT = Case(head_dim=24, v_dim=16, heads=4, kv_heads=1, values_in_keys=True)


@pytest.mark.parametrize("strategy", first([None, *STRATEGIES.values()], 3))
def test_k_is_sent_alone_in_the_forward(gloo, strategy):
    case = fitted(replace(LATENT, strategy=strategy or "ring", mask=full(), dtype="bfloat16", layout="contiguous"))
    counted = gloo(case.ranks, count, case, *(PerRank(*x) for x in case.inputs()))
    assert counted == [traffic(problem_of(case, "torch"), rank) for rank in range(case.ranks)]
    (forward, _), (as_before, _) = counted[0], traffic(problem_of(case, "torch").ordinary)
    assert forward.bytes < as_before.bytes


def arrays(dtype: torch.dtype = torch.float32, head_dim: int = 24) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 10, 4, head_dim, dtype=dtype), torch.randn(2, 10, 1, head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_v_as_a_slice_of_k_with_and_without_a_gradient(dtype):
    q, k = arrays(dtype)
    leaves = [x.requires_grad_() for x in (q, k)]
    options: dict[str, Any] = {"mask": sliding_window(4), "return_lse": True}
    for backend in ("auto", "blockwise"):
        ours, theirs = ring_attention(q, k, v_dim=16, backend=backend, **options), ring_attention(q, k, k[..., :16], **options)
        cotangents = [torch.randn_like(x) for x in ours]
        pairs = zip(*(torch.autograd.grad(each, leaves, cotangents) for each in (ours, theirs)), strict=True)
        assert all(torch.equal(a, b) for a, b in [*zip(ours, theirs, strict=True), *pairs])
        with torch.no_grad():
            assert torch.equal(ring_attention(q, k, None, v_dim=16, backend=backend, **options)[0], ours[0])


def test_only_one_of_q_and_k_may_need_a_gradient():
    q, k = arrays()
    want = torch.autograd.grad(ring_attention(q, k.requires_grad_(), k[..., :16]).square().sum(), k)[0]
    assert torch.equal(torch.autograd.grad(ring_attention(q, k, v_dim=16).square().sum(), k)[0], want)
    q, k = arrays()
    want = torch.autograd.grad(ring_attention(q.requires_grad_(), k, k[..., :16]).square().sum(), q)[0]
    assert torch.equal(torch.autograd.grad(ring_attention(q, k, v_dim=16).square().sum(), q)[0], want)


def test_a_compiled_function_and_a_vendors_kernel_take_it():
    q, k = arrays()
    want = ring_attention(q, k, k[..., :16])
    compiled = torch.compile(lambda q, k: ring_attention(q, k, v_dim=16), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k), want)
    leaf = k.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(compiled(q, leaf).sum(), leaf)[0], gradient(q, k))
    torch.testing.assert_close(ring_attention(q, k, v_dim=24, backend="flash"), ring_attention(q, k, k))
    leaf = k.clone().requires_grad_()
    ring_attention(q, leaf, v_dim=24, backend="flash").sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()


def gradient(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = k.clone().requires_grad_()
    return torch.autograd.grad(ring_attention(q, k, k[..., :16]).sum(), k)[0]


def test_k_is_not_copied():
    """The keys that a rank computes on are the user's own k."""
    from ring_attn_torch.attend.keys import pack

    k = torch.randn(2, 10, 1, 24)
    assert pack(k, None).kv is k
    assert np.shares_memory(pack(k, None).kv.numpy(), k.numpy())


@pytest.mark.parametrize("strategy", [Ulysses(ranks=2), TwoLevel(ranks=2), "direct"], ids=str)
def test_the_users_k_is_never_written(gloo, strategy):
    case = fitted(replace(LATENT, strategy=strategy, key_mask="random"))
    assert gloo(case.ranks, unchanged, case, *(PerRank(*x) for x in case.inputs())) == [True] * case.ranks


def unchanged(group: Any, case: Case, *shards: np.ndarray) -> bool:
    from .ring import on_rank

    before = shards[1].copy()
    on_rank(group, case, *shards)
    return bool(np.array_equal(before, shards[1], equal_nan=True))
