"""Dilated and summary attention on one GPU: right in both frameworks, and in a CUDA graph the same as outside."""

# pyright: reportArgumentType=false

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core import full
from ring_attn_torch import dilated_attention, summary_attention

from ..jax.framework import Jax
from ..support.dilated import Case, check, whole
from ..support.summaries import MEAN, SummaryCase
from ..torch.dilated import on_rank

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
JAX = Jax()
SIZES: dict[str, Any] = {"ranks": 1, "local": 1000, "heads": 8, "kv_heads": 2, "head_dim": 64, "v_dim": 64, "batch": 1}
DILATED = [
    Case((128, 256, 1024), (1, 2, 8), **SIZES, dtype="bfloat16"),
    Case((128, 256, 1024), (1, 2, 8), **SIZES, length=901),
    Case((100, 300, 900), (5, 3, 1), **SIZES, mixing="heads", mask=full(), dtype="bfloat16", key_mask=True),
]
SUMMARY = [
    SummaryCase(ranks=1, length=1000, block=64, window=100, summaries=4, heads=8, kv_heads=2, head_dim=64, v_dim=64, dtype=dtype)
    for dtype in ("bfloat16", "float32")
]


@pytest.mark.parametrize("case", DILATED, ids=str)
def test_dilated_attention_is_right_in_both_frameworks(case):
    check(case, whole([on_rank(None, case.dtype, case.arguments, case.shards()[0], "cuda")]))
    check(case, JAX.dilated(case))


@pytest.mark.parametrize("case", SUMMARY, ids=str)
def test_summary_attention_is_right_in_both_frameworks(case):
    given = {name: torch.from_numpy(x).cuda() for name, x in case.padded().items()}
    dtype = getattr(torch, case.dtype)
    leaves = [given[name].to(dtype).requires_grad_() for name in ("q", "k", "v", "pool") if name in given]
    total = summary_attention(*leaves, **case.options, return_lse=True)
    results = *total, *torch.autograd.grad(total, leaves, (given["dout"].to(dtype), given["dlse"]))
    ours = [x.detach().float().cpu().numpy() for x in results]
    case.check([*ours, *[None] * (case.pooling == MEAN)])
    case.check(JAX.summary(case))


@pytest.mark.parametrize(
    "attention",
    [
        partial(dilated_attention, segments=(128, 512), dilations=(1, 4)),
        partial(summary_attention, block=32, window=64, pooling="mean"),
    ],
    ids=["dilated", "summary"],
)
def test_a_cuda_graph_of_forward_and_backward_replays_with_other_inputs(attention):
    def qkv(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        make = lambda heads: torch.randn(1, 512, heads, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
        return [make(4), make(2), make(2)]

    def step(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = attention(*leaves)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    leaves, others = qkv(0), qkv(1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(leaves)
    with torch.no_grad():
        for mine, other in zip(leaves, others, strict=True):
            mine.copy_(other)
    graph.replay()
    for mine, expected in zip(captured, step(others), strict=True):
        np.testing.assert_array_equal(mine.detach().float().cpu(), expected.detach().float().cpu())
