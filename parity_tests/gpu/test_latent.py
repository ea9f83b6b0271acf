"""Values that are columns of keys on one GPU: 576/512 as latent attention reads it, and narrower heads, in both frameworks."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ring_attn_core import full, sliding_window

from ..jax import ring as on_jax
from ..support.cases import Case, check
from ..support.combinations import EVERYTHING
from .test_kernels import differing
from .tolerance import bound_on_hopper

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LATENT = Case(length=391, ranks=2, heads=4, kv_heads=1, head_dim=576, v_dim=512, dtype="bfloat16", values_in_keys=True)
FORWARD = [
    LATENT,
    replace(LATENT, dtype="float16", mask=full(), length=384),
    replace(LATENT, dtype="float32", length=131, mask=sliding_window(40)),
    replace(LATENT, head_dim=512),
    replace(LATENT, head_dim=528),
    replace(LATENT, head_dim=640, mask=sliding_window(100, 30), dtype="float16"),
    replace(LATENT, head_dim=564, v_dim=500),
    *(replace(LATENT, **features) for features in (
        {"extents": "documents"}, {"key_extents": "tree"}, {"key_mask": "random"}, {"softcap": 2.0}, {"sinks": True},
        {"alibi": True}, {"dropout_rate": 0.3},
    )),
    *(replace(case, length=307, kv_length=None, heads=4, kv_heads=1, head_dim=576, v_dim=512, ranks=2, values_in_keys=True)
      for case in EVERYTHING if case.dtype != "float64"),
]  # fmt: skip
"""Heads that "auto" gives to the portable forward."""
BOTH = [
    replace(LATENT, head_dim=head_dim, v_dim=v_dim, dtype=dtype, extents=extents)
    for head_dim, v_dim in ((192, 128), (320, 256), (80, 64), (512, 448), (256, 40))
    for dtype, extents in (("bfloat16", None), ("float16", "documents"))
]


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_the_forward_of_wide_keys_is_exact_and_the_same_in_both_frameworks_to_the_bit(case):
    """Gradients are those of "blockwise", unless heads are of 512: the kernels of a backward take no wider ones."""
    from .emulate import on_jax, on_torch

    case = replace(case, poison=True)
    ours, theirs = on_torch(case, "auto"), on_jax(case, "auto")
    check(case, ours)
    check(case, theirs)
    assert {"out", "lse"}.isdisjoint(differing(ours, theirs))


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_narrower_heads_are_exact_with_gradients(backend, case, programs):
    from .emulate import on_jax, on_torch

    if backend == "hopper" and (torch.cuda.get_device_capability() != (9, 0) or case.head_dim > 256):
        pytest.skip("Hopper's kernels take heads of up to 256, on Hopper GPUs")
    programs(3)
    case = replace(case, poison=True)
    ours, theirs = on_torch(case, backend), on_jax(case, backend)
    check(case, ours, bound_on_hopper if backend == "hopper" else None)
    assert differing(ours, theirs) == []


def test_the_public_call_runs_it_with_gradients_in_both_frameworks():
    """The forward by the portable kernel, and the backward of heads of 576 by "blockwise"."""
    from ring_attn_torch import ring_attention

    case = replace(LATENT, ranks=1, length=256)
    q, k, _, dout, *_ = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in case.arrays.values())
    leaves = [x.requires_grad_() for x in (q, k)]
    out = ring_attention(q, k, v_dim=512)
    dq, dk = torch.autograd.grad(out, leaves, dout)
    theirs = on_jax.run(replace(case, own={"dlse": np.zeros_like(case.arrays["dlse"])}))
    for mine, other in ((out, theirs.out), (dq, theirs.dq), (dk, theirs.dk)):
        np.testing.assert_allclose(mine.detach().float().cpu().numpy(), other, rtol=2e-2, atol=2e-2)


def test_the_portable_kernel_at_real_size_is_the_blockwise_one():
    from ring_attn_torch import ring_attention

    torch.manual_seed(0)
    q, k = (torch.randn(1, 4096, heads, 576, device="cuda").bfloat16() for heads in (16, 1))
    ours, plain = (ring_attention(q, k, v_dim=512, backend=backend).float() for backend in ("triton", "blockwise"))
    assert (ours - plain).norm() / plain.norm() <= 5e-3
