"""Dilated attention in PyTorch: what it sends, what torch.func and torch.compile make of it, and what ranks refuse alike."""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core import full
from ring_attn_torch import dilated_attention
from ring_attn_torch.ring import transfer
from ring_attn_torch.variants.dilated import COMPILES

from ..support.dilated import Case, check
from ..support.spawn import PerRank
from .dilated import on_rank
from .framework import Torch


def counted(group: Any, *arguments: Any) -> int:
    sends, send = [], transfer.dist.batch_isend_irecv
    transfer.dist.batch_isend_irecv = lambda operations: sends.append(operations) or send(operations)  # type: ignore[assignment]
    try:
        on_rank(group, *arguments)
    finally:
        transfer.dist.batch_isend_irecv = send
    return len(sends)


@pytest.mark.parametrize(
    ("segments", "dilations", "mask", "sends"),
    [
        ((8,), (2,), full(), 0),  # every segment lies within a rank
        ((4, 16), (1, 2), full(), 7),  # two ranks share one: keys come from the rank before and the one after
        ((12,), (1,), Case().mask, 4),  # only from the one before: a hop forward, one backward with gradients, their way home
    ],
)
def test_ranks_that_share_no_segment_exchange_nothing(gloo, segments, dilations, mask, sends):
    case = Case(segments, dilations, mask=mask)
    got = gloo(case.ranks, counted, case.dtype, case.arguments, PerRank(*case.shards()))
    assert got == [sends] * case.ranks


def test_torch_func_is_refused_in_words():
    q, k, v = torch.ones(3, 1, 8, 2, 4).unbind()
    attend = lambda q: dilated_attention(q, k, v, segments=(4,), dilations=(2,)).sum()
    with pytest.raises(NotImplementedError, match=r"no derivative under torch\.func\.grad"):
        torch.func.grad(attend)(q)


def refused(group: Any, rank: int, wrong: dict[str, Any]) -> str:
    arguments = {"segments": (4, 8), "dilations": (1, 2), **{name: torch.ones(1, 6, 4, 8) for name in "qkv"}}
    if rank == 2:
        arguments |= wrong
    try:
        dilated_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), group=group, **arguments)
    except ValueError as error:
        return str(error)
    return "nothing"


WRONG = {
    "segments that do not increase": ({"segments": (8, 8)}, "rank 2: segments must be at least 1 token long and strictly"),
    "fewer keys": ({"k": torch.ones(1, 5, 4, 8), "v": torch.ones(1, 5, 4, 8)}, "rank 2: q has 6 tokens and k has 5"),
    "no tensor": ({"k": [1.0]}, "rank 2: k must be a torch.Tensor, got list"),
    "a vendor's backend": ({"backend": "flash"}, "rank 2: the lse of backend='flash' has no gradient"),
    "other segments": ({"segments": (4, 6)}, "disagree on segments: '[4, 8]' on rank 0, '[4, 6]' on rank 2"),
    "another mixing": ({"mixing": "heads"}, "disagree on mixing: \"'softmax'\" on rank 0"),
    "another mask": ({"mask": full()}, "disagree on mask"),
    "another batch": ({name: torch.ones(2, 6, 4, 8) for name in "qkv"}, "disagree on q_shape"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_all_ranks_refuse_alike_the_mistakes_of_one(gloo, wrong):
    arguments, message = wrong
    got = gloo(3, refused, PerRank(0, 1, 2), arguments)
    assert set(got) == {got[0]}
    assert message in got[0]
    check(case := Case(ranks=3), Torch(lambda: gloo).dilated(case))


@pytest.mark.skipif(not COMPILES, reason="PyTorch before 2.15 compiles it to something else")
@pytest.mark.full
def test_torch_compile_gives_the_same(gloo):
    case = Case((6, 16), (2, 4), ranks=2, local=9, heads=6, kv_heads=2)
    torch._dynamo.reset()
    for ours, plain in zip(gloo(2, compiled, case.arguments, PerRank(*case.shards())), run_shards(gloo, case), strict=True):
        for a, b in zip(ours, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def run_shards(pool: Any, case: Case) -> list[list[np.ndarray]]:
    return pool(case.ranks, on_rank, case.dtype, case.arguments, PerRank(*case.shards()))


def compiled(group: Any, arguments: dict[str, Any], shards: dict[str, np.ndarray]) -> list[np.ndarray]:
    q, k, v, dout, dlse = (torch.from_numpy(np.ascontiguousarray(x)) for x in shards.values())
    leaves = [x.requires_grad_() for x in (q, k, v)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Any, k: Any, v: Any) -> Any:
        return dilated_attention(q, k, v, group=group, **arguments, return_lse=True)

    out, lse = call(*leaves)
    return [x.detach().numpy() for x in (out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse)))]
