"""Summary attention in PyTorch: out, lse and every gradient against float64; what leaks, what travels, what is refused."""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ring_attn_torch import SummaryAttention, from_numpy, ring_attention, sum_gradients, summary_attention
from ring_attn_torch.ring.strategies import ring as strategy

from ..support.models import LENGTH, layer_data
from ..support.spawn import PerRank, Ranks
from ..support.summaries import (
    CASES,
    EXACT,
    MEAN,
    MORE,
    REFUSED,
    SUMMARY_LAYER,
    SummaryCase,
    check_summary_layer,
    refused,
    summary_weights,
)
from .models import Group, gradients, rank_in, ranks_of


def run(pool: Ranks, case: SummaryCase) -> list[Any]:
    """out, lse, dq, dk, dv as whole arrays, padding included, and dpool, summed over the ranks."""
    results = pool(case.ranks, on_rank, case, PerRank(*case.shards()))
    whole: list[Any] = [np.concatenate([r[i] for r in results], 1) for i in range(5)]
    return [*whole, np.sum([r[5] for r in results], 0) if case.pooling != MEAN else None]


def on_rank(group: Group, case: SummaryCase, shards: dict[str, np.ndarray]) -> list[np.ndarray]:
    dtype = getattr(torch, case.dtype)
    tensors = {name: torch.from_numpy(x) for name, x in shards.items()}
    leaves = [tensors[name].to(dtype).requires_grad_() for name in ("q", "k", "v", "pool") if name in tensors]
    arguments = {**case.options, "key_mask": tensors.get("key_mask"), "group": group, "return_lse": True}
    total = summary_attention(*leaves, **arguments)
    cotangents = tensors["dout"].to(dtype), tensors["dlse"]
    results = *total, *torch.autograd.grad(total, leaves, cotangents)
    return [x.detach().to(torch.promote_types(x.dtype, torch.float32)).numpy() for x in results]


@pytest.mark.parametrize("case", CASES + EXACT, ids=str)
def test_out_lse_and_all_gradients_are_as_near_to_float64_as_one_devices(gloo, case):
    case.check(run(gloo, case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_of_them_are(gloo, case):
    case.check(run(gloo, case))


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_where_it_represents_every_token_it_is_exact_attention(gloo, case):
    arrays = {name: torch.from_numpy(x) for name, x in case.arrays.items()}
    qkv = (arrays[name] for name in "qkv")
    exact = ring_attention(*qkv, layout="contiguous", key_mask=arrays.get("key_mask")).numpy()
    out, *_ = run(gloo, case)
    np.testing.assert_allclose(out[:, : case.length], exact, rtol=0, atol=2e-6)
    alone, *_ = run(gloo, SummaryCase(1, window=36))
    if case.pooling != MEAN:
        np.testing.assert_array_equal(alone, exact)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_later_tokens_change_nothing_on_any_rank(gloo, ranks):
    """To the bit, with every token from one on changed: at the start of a block, within it, and its last one."""
    case = SummaryCase(ranks, block=5, window=3)
    before = run(gloo, case)
    for token in (20, 23, 24):
        later = lambda x, token=token: np.concatenate([x[:, :token], -3 * x[:, token:]], 1)
        after = run(gloo, case.given(**{name: later(case.arrays[name]) for name in "qkv"}))
        for a, b in zip(before[:2], after[:2], strict=True):
            np.testing.assert_array_equal(a[:, :token], b[:, :token])
            assert (a[:, token : case.length] != b[:, token : case.length]).any()


def test_tokens_beyond_the_window_are_seen_through_their_summaries_alone(gloo):
    """Two tokens of a block that move apart, so that its mean stays: who sees the tokens notices, who sees the mean does not."""
    case = SummaryCase(4, block=5, window=3, summaries=1, pooling=MEAN)
    moved = {}
    for name in "kv":
        moved[name] = case.arrays[name].copy()
        moved[name][:, 11] += 1
        moved[name][:, 13] -= 1
    before, after = run(gloo, case)[0], run(gloo, case.given(**moved))[0]
    first = lambda i: 5 * (max(i - 3, 0) // 5)
    last = max(i for i in range(case.length) if first(i) <= 13)
    assert (np.abs(before - after)[:, 11 : last + 1].max((0, 2, 3)) > 1e-3).all()
    np.testing.assert_allclose(before[:, last + 1 : case.length], after[:, last + 1 : case.length], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(before[:, :11], after[:, :11])


@pytest.mark.parametrize("case", [*CASES, EXACT[0], MORE[2]], ids=str)
def test_the_bytes_that_every_rank_sends_are_the_formulas(gloo, case):
    size = 2 if case.dtype == "bfloat16" else 4
    expected = case.plan.bytes_sent(case.batch, case.kv_heads, (case.head_dim, case.v_dim), size, case.masked)
    for sent in gloo(case.ranks, count_bytes, case, PerRank(*case.shards())):
        assert sent == tuple(expected)


def count_bytes(group: Group, case: SummaryCase, shards: dict[str, np.ndarray]) -> tuple[int, int]:
    """What this rank sends forward and backward; of a collective, what each other rank gets."""
    sent = [0]
    send, all_gather, reduce_scatter = strategy.send, dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def sending(x, hop, group):
        sent[-1] += bool(hop) * sum(a.numel() * a.element_size() for a in x if a is not None)
        return send(x, hop, group)

    def gathering(whole, mine, group):
        sent[-1] += (ranks_of(group) - 1) * mine.numel() * mine.element_size()
        return all_gather(whole, mine, group=group)

    def scattering(mine, whole, group):
        sent[-1] += (ranks_of(group) - 1) * mine.numel() * mine.element_size()
        return reduce_scatter(mine, whole, group=group)

    dtype, tensors = getattr(torch, case.dtype), {name: torch.from_numpy(x) for name, x in shards.items()}
    leaves = [tensors[name].to(dtype).requires_grad_() for name in ("q", "k", "v", "pool") if name in tensors]
    with (
        patch.object(strategy, "send", sending),
        patch.object(dist, "all_gather_into_tensor", gathering),
        patch.object(dist, "reduce_scatter_tensor", scattering),
    ):
        out = summary_attention(*leaves, **case.options, key_mask=tensors.get("key_mask"), group=group)
        sent.append(0)
        out.backward(torch.ones_like(out))
    return sent[0], sent[1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_compiles_as_one_graph(gloo):
    assert all(gloo(2, compiled_on_rank, PerRank(*SummaryCase(2).shards())))


def compiled_on_rank(group: Group, shards: dict[str, np.ndarray]) -> bool:
    case, results = SummaryCase(2), []
    leaves = [torch.from_numpy(np.nan_to_num(shards[name])).requires_grad_() for name in ("q", "k", "v", "pool")]
    call = lambda *arrays: summary_attention(*arrays, **case.options, group=group).sin()
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_layer_is_right_in_every_weight(gloo, ranks):
    weights, (x, dout) = summary_weights(), layer_data()
    for got in gloo(ranks, layer_on_rank, weights, x, dout)[:1]:
        check_summary_layer(got, weights, x, dout)


def layer_on_rank(group: Group, weights: dict[str, np.ndarray], x: np.ndarray, dout: np.ndarray) -> dict[str, np.ndarray]:
    layer = from_numpy(SummaryAttention(**SUMMARY_LAYER, group=group), weights)
    rank, ranks = rank_in(group), ranks_of(group)
    missing = -LENGTH % ranks
    mine = lambda x: torch.nn.functional.pad(torch.from_numpy(x), (0, 0, 0, missing)).chunk(ranks, 1)[rank]
    shard = mine(x).clone().requires_grad_()
    out = layer(shard, length=LENGTH)
    out.backward(mine(dout))
    sum_gradients(layer, group)
    assert shard.grad is not None
    whole: dict[str, Any] = {}
    for name, part in (("out", out.detach()), ("dx", shard.grad)):
        shards = [torch.empty_like(part) for _ in range(ranks)]
        dist.all_gather(shards, part.contiguous(), group=group)
        whole[name] = torch.cat(shards, 1)[:, :LENGTH].numpy()
    return whole | gradients(layer)


def test_one_summary_starts_as_the_mean_and_several_start_apart():
    one, two = (SummaryAttention(8, 2, block=4, summaries=n, window=3).pool for n in (1, 2))
    assert one is not None and two is not None
    assert not one.any()
    assert not torch.equal(two[0], two[1])
    assert SummaryAttention(8, 2, block=4, window=3, pooling=MEAN).pool is None
    with pytest.raises(ValueError, match="summaries must be an int of at least 1"):
        SummaryAttention(8, 2, block=4, summaries=0, window=3)
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 8\], got \[1, 8\]"):
        SummaryAttention(8, 2, block=4, window=3)(torch.ones(1, 8))


def test_the_pool_has_a_gradient_where_no_block_is_summarized():
    case = SummaryCase(1, window=36)
    leaves = [torch.from_numpy(case.arrays[name]).requires_grad_() for name in ("q", "k", "v", "pool")]
    summary_attention(*leaves, **case.options).sum().backward()
    assert leaves[3].grad is not None and not leaves[3].grad.any()


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_what_does_not_fit_is_refused(change, message):
    arrays, options = refused(change)
    with pytest.raises(ValueError, match=message):
        summary_attention(**{name: x if x is None else torch.from_numpy(x) for name, x in arrays.items()}, **options)


def test_blocks_and_windows_of_more_tokens_than_int32_counts_are_exact_attention():
    q, k, v = torch.randn(3, 1, 16, 4, 8).unbind()
    exact = ring_attention(q, k, v, layout="contiguous")
    for asked in ({"block": 2**40, "window": 1}, {"block": 2**31, "window": 1}, {"block": 4, "window": 2**40}):
        assert torch.equal(summary_attention(q, k, v, **asked, pooling=MEAN), exact)


def test_what_is_no_tensor_is_refused():
    arrays, options = refused({})
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    for name in arrays:
        with pytest.raises(ValueError, match=f"{name} must be a torch.Tensor, got ndarray"):
            summary_attention(**tensors | {name: arrays[name]}, **options)
    with pytest.raises(ValueError, match="pool is sparse or nested: pass a dense tensor"):
        summary_attention(**tensors | {"pool": tensors["pool"].to_sparse()}, **options)
    with pytest.raises(ValueError, match="pool must have a floating dtype, got int64: cast it first"):
        summary_attention(**tensors | {"pool": tensors["pool"].long()}, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{}, {"block": 5}], "disagree on block: 4 on rank 0, 5 on rank 1"),
        ([{"summaries": 0}, {}], "rank 0: summaries must be an int of at least 1"),
        ([{}, {"pool": (1, 2, 16)}], r"rank 1: pool must be \[summaries, kv_heads, head_dim\]"),
        ([{}, {"key_mask": (2, 37)}], "disagree on key_mask: False on rank 0, True on rank 1"),
    ],
    ids=["block", "summaries", "pool", "key_mask"],
)
def test_ranks_that_differ_are_refused_alike_before_anything_is_sent(gloo, changes, message):
    for outcome in gloo.outcomes(2, differing_on_rank, PerRank(*changes)):
        assert isinstance(outcome, ValueError)
        with pytest.raises(ValueError, match=message):
            raise outcome


def differing_on_rank(group: Group, change: dict[str, Any]) -> None:
    arrays, options = refused(change)
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    with patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("something was sent")):
        summary_attention(**tensors, **options, group=group)
