"""Summary attention in PyTorch: what travels, its layer, and what ranks refuse alike."""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ring_attn_torch import summary_attention
from ring_attn_torch.ring import collectives
from ring_attn_torch.ring.strategies import ring as strategy

from ..support.spawn import PerRank
from ..support.summaries import CASES, EXACT, MORE, SummaryCase, refused
from .models import Group, ranks_of


@pytest.mark.parametrize("case", [*CASES, EXACT[0], MORE[2]], ids=str)
def test_the_bytes_that_every_rank_sends_are_the_formulas(gloo, case):
    size = 2 if case.dtype == "bfloat16" else 4
    expected = case.plan.bytes_sent(case.batch, case.kv_heads, (case.head_dim, case.v_dim), size, case.masked)
    for sent in gloo(case.ranks, count_bytes, case, PerRank(*case.shards())):
        assert sent == tuple(expected)


def count_bytes(group: Group, case: SummaryCase, shards: dict[str, np.ndarray]) -> tuple[int, int]:
    """Count the bytes that this rank sends forward and backward; of a collective, those that each other rank gets."""
    sent = [0]
    send, all_gather, reduce_scatter = strategy.send, collectives.all_gather_single, collectives.reduce_scatter_single

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
        patch.object(collectives, "all_gather_single", gathering),
        patch.object(collectives, "reduce_scatter_single", scattering),
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


def test_arguments_that_are_not_dense_floating_tensors_are_refused():
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
    gloo.refuse(message, 2, differing_on_rank, PerRank(*changes))


def differing_on_rank(group: Group, change: dict[str, Any]) -> None:
    arrays, options = refused(change)
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    with patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("something was sent")):
        summary_attention(**tensors, **options, group=group)
