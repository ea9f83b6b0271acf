"""Blocks merged are the whole: attend_block and merge against float64, on runs of every stride, gradients through both."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from ring_attn_core import Run, causal, full
from ring_attn_core.reference.oracle import Attention
from ring_attn_torch import attend_block, merge

from ..support.blocks import CASES, Cut, cuts
from ..support.cases import Case, check
from .ring import patch_tiles


@pytest.mark.pairs
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cut", cuts(), ids=str)
def test_blocks_merged_are_the_whole(case: Case, cut: Cut):
    make = lambda name, dtype: torch.from_numpy(case.arrays[name]).to(getattr(torch, dtype))
    leaves = [make(name, case.dtype).requires_grad_() for name in "qkv"]
    features = {name: torch.from_numpy(x) for name, x in case.features.items()}
    sinks = features.pop("sinks").requires_grad_()
    with patch_tiles(case):
        out, lse = attention_in_blocks(case, cut, *leaves, sinks, features)
        gradients = torch.autograd.grad((out, lse), (*leaves, sinks), (make("dout", "float32"), make("dlse", "float32")))
    check(case, Attention(*(x.detach().float().numpy() for x in (out, lse, *gradients))))


def attention_in_blocks(case, cut, q, k, v, sinks, features):
    """Every block of queries over every block of keys, merged with the sink, back in natural order."""
    outs, lses = [], []
    options = {**case.scalars, "mask": case.mask, "alibi_slopes": features.get("alibi_slopes")}
    for q_run in cut.runs(q.shape[1]):
        i = list(q_run.positions())
        total = torch.zeros(*q[:, i].shape[:3], v.shape[-1]), sinks.expand(*q[:, i].shape[:3])
        for k_run in cut.runs(k.shape[1]):
            j = list(k_run.positions())
            own = {"extents": i, "key_extents": j, "key_mask": j}
            masks = {name: x[:, own[name]] for name, x in features.items() if name in own}
            total = merge(total, attend_block(q[:, i], k[:, j], v[:, j], q_run=q_run, k_run=k_run, **masks, **options))
        outs.append(total[0])
        lses.append(total[1])
    order = np.argsort([position for run in cut.runs(q.shape[1]) for position in run.positions()]).tolist()
    return torch.cat(outs, 1)[:, order], torch.cat(lses, 1)[:, order]


def test_what_a_block_holds_beyond_its_runs_is_never_read():
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    want = attend_block(q[:, :5], k[:, :6], v[:, :6], mask=full())
    for x, length in ((q, 5), (k, 6), (v, 6)):
        x[:, length:] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attend_block(*leaves, mask=full(), q_run=Run(0, 5), k_run=Run(0, 6))
    torch.testing.assert_close(out[:, :5], want[0])
    assert (out[:, 5:] == 0).all()
    assert (lse[:, 5:] == -math.inf).all()
    for gradient, length in zip(torch.autograd.grad(out.sum(), leaves), (5, 6, 6), strict=True):
        assert gradient.isfinite().all()
        assert (gradient[:, length:] == 0).all()


@pytest.mark.parametrize("wrong", [[5, 2], [-1, 3], [3, 2**30 + 1]], ids=["reversed", "negative", "too far"])
def test_wrong_extents_are_found_in_a_block_too(wrong):
    q, extents = torch.randn(1, 8, 2, 4), torch.tensor([[0, 8]] * 8)[None]
    extents[0, 6] = torch.tensor(wrong)
    with pytest.raises(ValueError, match=r"extents must be 0 <= first <= end .* for the query at position 16 of batch row 0"):
        attend_block(q, q, q, extents=extents, q_run=Run(10, 8), k_run=Run(0, 8), mask=full())
    with pytest.raises(ValueError, match=r"key_extents must be 0 <= first <= end .* for the key at position 16 of batch row 0"):
        attend_block(q, q, q, key_extents=extents, q_run=Run(0, 8), k_run=Run(10, 8), mask=full())


def test_merging_with_nothing_changes_nothing_and_gives_no_nan():
    out, lse = torch.randn(1, 3, 2, 4, requires_grad=True), torch.randn(1, 3, 2, requires_grad=True)
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for a, b in (((out, lse), nothing), (nothing, (out, lse))):
        merged = merge(a, b)
        torch.testing.assert_close(merged, (out, lse), rtol=0, atol=1e-6)
        gradients = torch.autograd.grad(merged[0].sum() + merged[1].sum(), (out, lse))
        torch.testing.assert_close(gradients, (torch.ones_like(out), torch.ones_like(lse)))
    assert merge(nothing, nothing)[0].eq(0).all()
    assert merge(nothing, nothing)[1].eq(-math.inf).all()


def test_merging_does_not_depend_on_order():
    a, b, c = ((torch.randn(1, 5, 2, 4), 30 * torch.randn(1, 5, 2)) for _ in range(3))
    torch.testing.assert_close(merge(merge(a, b), c), merge(a, merge(c, b)))


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


def test_the_values_of_an_identity_give_the_weights_of_attention():
    q, k = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 2, 8)
    weights, _ = attend_block(q, k, torch.eye(9)[None, :, None].expand(1, 9, 2, 9), mask=causal())
    scores = 8**-0.5 * torch.einsum("bshd,bthd->bsht", q, k.repeat_interleave(2, 2))
    hidden = ~torch.ones(9, 9).tril().bool()[None, :, None]
    torch.testing.assert_close(weights, scores.masked_fill(hidden, -math.inf).softmax(-1), rtol=0, atol=1e-6)
