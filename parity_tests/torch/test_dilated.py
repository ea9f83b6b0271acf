"""Dilated attention in PyTorch against a dense float64 oracle: out, lse and every gradient within the computed bound, on gloo."""

# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core import full
from ring_attn_torch import dilated_attention, ring_attention
from ring_attn_torch.ring import transfer
from ring_attn_torch.variants.dilated import COMPILES

from ..support.dilated import CASES, PUBLISHED, Case, by_name, check
from ..support.selection import one_of_each
from ..support.spawn import PerRank
from .dilated import on_rank, run


@pytest.mark.parametrize("case", one_of_each(2, CASES), ids=str)
def test_out_lse_and_gradients_are_exact(gloo, case):
    check(case, run(gloo, case))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mixing", ["softmax", "heads"])
def test_every_ring_is_exact_at_an_odd_length(gloo, mixing, ranks):
    check(case := Case((7, 12, 90), (1, 4, 3), ranks, -(-37 // ranks), 4, 2, mixing, length=37), run(gloo, case))


@pytest.mark.full
def test_the_published_setting_is_exact(gloo):
    check(PUBLISHED, run(gloo, PUBLISHED))


@pytest.mark.pairs
@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=str)
@pytest.mark.parametrize("token", [1, 9, 20])
def test_future_tokens_change_nothing_on_any_rank(gloo, case, token):
    case = replace(case, length=None)
    later = {name: np.concatenate([x[:, :token], -3 * x[:, token:]], 1) for name, x in case.arrays.items() if name in "qkv"}
    before, after = run(gloo, case), run(gloo, replace(case).given(**later))
    for name in ("out", "lse"):
        np.testing.assert_array_equal(getattr(before, name)[:, :token], getattr(after, name)[:, :token])
    assert (before.out[:, token:] != after.out[:, token:]).any()


def test_tokens_of_another_segment_and_of_another_offset_change_nothing(gloo):
    case = Case((8,), (4,), ranks=3, heads=4, kv_heads=4, mask=full())
    changed = np.zeros(case.tokens, bool)
    changed[8:16] = True
    changed[[0, 1, 3]] = True  # head 2 keeps 2 and 6
    other = {name: np.where(changed[:, None, None], -3 * case.arrays[name], case.arrays[name]) for name in "qkv"}
    before, after = run(gloo, case), run(gloo, replace(case).given(**other))
    np.testing.assert_array_equal(before.out[:, 16:], after.out[:, 16:])
    np.testing.assert_array_equal(before.out[:, 2:8:4, 2], after.out[:, 2:8:4, 2])
    assert (before.out[:, 10:16:4, 2] != after.out[:, 10:16:4, 2]).all()


def test_a_token_that_every_pattern_leaves_out_is_0_and_has_no_gradient(gloo):
    case = Case((8, 16), (4, 8), ranks=2, heads=2, kv_heads=2)
    got = run(gloo, case)
    left_out = [p for p in range(case.tokens) if p % 4 > 1]
    for name, x in by_name(got).items():
        np.testing.assert_array_equal(x[:, left_out], -np.inf if name == "lse" else 0, err_msg=name)


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
        (
            (12,),
            (1,),
            Case().mask,
            4,
        ),  # only from the one before: a hop forward, and one backward with gradients and their way home
    ],
)
def test_ranks_that_share_no_segment_exchange_nothing(gloo, segments, dilations, mask, sends):
    case = Case(segments, dilations, mask=mask)
    got = gloo(case.ranks, counted, case.dtype, case.arguments, PerRank(*case.shards()))
    assert got == [sends] * case.ranks


def test_one_pattern_over_everything_is_ring_attention_to_the_bit():
    q, k, v = torch.randn(3, 1, 12, 4, 8).unbind()
    assert torch.equal(
        dilated_attention(q, k, v, segments=(12,), dilations=(1,)),
        ring_attention(q, k, v, layout="contiguous", backend="blockwise"),
    )


def test_nothing_is_lost_where_scores_are_huge():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 16, 4, 8).mul(1e4).unbind())
    out = dilated_attention(q, k, v, segments=(4, 8), dilations=(1, 2), scale=1e4)
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))))


@pytest.mark.parametrize(("huge", "same"), [((3 * 2**30, 3), (18, 3)), ((2**40, 2), (16, 2)), ((2**40, 2**40), (16, 16))])
def test_patterns_of_more_tokens_than_int32_counts_are_those_of_the_whole_sequence(huge, same):
    q, k, v = torch.randn(3, 1, 16, 4, 8).unbind()
    got, whole = (dilated_attention(q, k, v, segments=(segment,), dilations=(r,)) for segment, r in (huge, same))
    assert torch.equal(got, whole)
    assert whole.any()


def test_no_tokens_give_no_tokens():
    q, k, v = (x.requires_grad_() for x in torch.ones(3, 2, 0, 4, 8).unbind())
    out = dilated_attention(q, k, v, segments=(4, 8), dilations=(2, 1))
    assert out.shape == (2, 0, 4, 8)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [(2, 0, 4, 8)] * 3


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
    "a dilation that does not divide": (
        {"dilations": (1, 3)},
        "rank 2: a dilation must divide its segment, got 3 for a segment of 8",
    ),
    "more patterns than heads": (
        {"segments": (1, 2, 3, 4, 5), "dilations": (1,) * 5, "mixing": "heads"},
        'rank 2: mixing="heads" gives every pattern a group of heads, got 5 patterns for 4 heads',
    ),
    "fewer keys": ({"k": torch.ones(1, 5, 4, 8), "v": torch.ones(1, 5, 4, 8)}, "rank 2: q has 6 tokens and k has 5"),
    "no tensor": ({"k": [1.0]}, "rank 2: k must be a torch.Tensor, got list"),
    "a vendor's backend": ({"backend": "flash"}, "rank 2: the lse of backend='flash' has no gradient"),
    "other segments": ({"segments": (4, 6)}, "disagree on segments: '[4, 8]' on rank 0, '[4, 6]' on rank 2"),
    "another mixing": ({"mixing": "heads"}, "disagree on mixing: \"'softmax'\" on rank 0"),
    "another mask": ({"mask": full()}, "disagree on mask"),
    "another batch": ({name: torch.ones(2, 6, 4, 8) for name in "qkv"}, "disagree on q_shape"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_one_rank_gets_wrong_all_ranks_refuse_alike(gloo, wrong):
    arguments, message = wrong
    got = gloo(3, refused, PerRank(0, 1, 2), arguments)
    assert set(got) == {got[0]}
    assert message in got[0]
    check(case := Case(ranks=3), run(gloo, case))


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
