"""A few queries over a cache spread over the ranks: exact for random problems, the same bits on every rank, clear refusals."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ring_attn_torch import merge_ring, tree_attention_decode
from ring_attn_torch.attend import slots as attend
from ring_attn_torch.ring import agreement

from ..support.decode import Problem, Shape, check
from .decode import as_numpy, on_rank, tensors

EVERYTHING = Shape(batch=2, queries=5, slots=61, features=("tree_mask", "window", "scale", "softcap", "sinks", "alibi_slopes"))


def test_long_caches_are_exact_chunk_by_chunk(monkeypatch):
    """Read several chunks, of which the last is short and unseen."""
    monkeypatch.setattr(attend, "CHUNK", 2**15)
    for dtype, slots in (("float32", 3_501), ("bfloat16", 3_001)):
        problem = Problem(Shape(slots=slots, queries=2, heads=16, kv_heads=2, head_dim=8, v_dim=8, dtype=dtype), seed=24)
        last = problem.arrays["q_positions"].max()
        assert last > attend.CONVERTED, "a long cache"
        of_last_chunk = problem.arrays["k_positions"][..., slots // attend.CONVERTED * attend.CONVERTED :]
        assert not ((of_last_chunk >= 0) & (of_last_chunk <= last)).any()
        arrays = tensors(problem, 0)
        problem.check(*as_numpy(tree_attention_decode(**arrays, return_lse=True)))


def test_the_error_of_a_long_cache_is_that_of_a_short_one():
    shape = Shape(slots=70_001, queries=2, heads=16, kv_heads=2, head_dim=8, v_dim=8, dtype="float32")
    problems = [Problem(shape, seed=seed) for seed in (2, 3, 5, 8, 11, 12, 13, 14)]
    assert all((problem.arrays["q_positions"] > shape.slots / 2).all() for problem in problems), "a long cache"
    check(problems, [as_numpy(tree_attention_decode(**tensors(problem, 0), return_lse=True)) for problem in problems])


def test_a_chain_of_nodes_is_what_no_tree_is():
    problem = Problem(replace(EVERYTHING, batch=1), seed=1)
    assert (problem.arrays["q_positions"] > 0).all(), "tokens come before the nodes"
    arrays = tensors(problem, 0) | {"tree_mask": torch.ones(1, 5, 5).tril().bool()}
    as_tree = tree_attention_decode(**arrays)
    del arrays["tree_mask"]
    torch.testing.assert_close(as_tree, tree_attention_decode(**arrays), rtol=0, atol=1e-6)


def test_a_branch_of_a_tree_is_the_sequence_that_it_would_continue():
    """Two branches of three nodes: each is decoded as if the other were not there, window and ALiBi from its own depth."""
    problem = Problem(Shape(queries=6, slots=40, features=("window", "alibi_slopes", "sinks")))
    arrays = tensors(problem, 0)
    k_positions, base = torch.arange(40, dtype=torch.int32)[None], 34
    branches = torch.tensor([0, 1, 0, 1, 1, 0])
    mask = (branches[:, None] == branches) & torch.ones(6, 6).tril().bool()
    k, v = (torch.nan_to_num(arrays[name], 1.0) for name in "kv")
    given = arrays | {"k": k, "v": v, "k_positions": k_positions, "window": 20}
    out = tree_attention_decode(**given | {"q_positions": k_positions[:, base:], "tree_mask": mask[None]})
    for branch in (0, 1):
        nodes = (branches == branch).nonzero()[:, 0]
        slots = torch.cat([torch.arange(base), base + nodes])
        alone = given | {"q": arrays["q"][:, nodes], "k": k[:, slots], "v": v[:, slots]}
        alone |= {"k_positions": k_positions[:, : base + 3], "q_positions": k_positions[:, base : base + 3]}
        torch.testing.assert_close(out[:, nodes], tree_attention_decode(**alone), rtol=0, atol=1e-6)


def test_repeats_give_the_same_bits():
    arrays = tensors(Problem(EVERYTHING), 0)
    once = tree_attention_decode(**arrays)
    assert all(torch.equal(once, tree_attention_decode(**arrays)) for _ in range(100))


def test_ranks_may_have_other_numbers_of_slots(gloo):
    problem = Problem(Shape(ranks=3, slots=40, batch=2, queries=2))
    problem.arrays["k_positions"][1, :, 7:] = -1
    problem.arrays["k_positions"][2] = -1
    outs = gloo(3, with_few_slots, problem)
    problem.check(*outs[0])


def with_few_slots(group, problem):
    arrays = tensors(problem, dist.get_rank())
    slots = [40, 7, 0][dist.get_rank()]
    cut = {name: arrays[name][:, :slots] for name in ("k", "v", "k_positions")}
    return as_numpy(tree_attention_decode(**arrays | cut, group=group, return_lse=True))


def test_a_repeated_call_asks_no_other_rank(gloo):
    gloo(2, repeated)


def repeated(group):
    problem = Problem(Shape(ranks=2, slots=33))
    once = on_rank(group, [problem])
    with patch.object(agreement, "_exchange", side_effect=AssertionError("asked")):
        again = on_rank(group, [problem])
    assert np.array_equal(once[0][0], again[0][0])


def arrays(**changed: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "q": torch.ones(1, 2, 4, 8),
        "k": torch.ones(1, 6, 2, 8),
        "v": torch.ones(1, 6, 2, 5),
        "q_positions": torch.tensor([[3, 4]], dtype=torch.int32),
        "k_positions": torch.arange(6, dtype=torch.int32)[None],
    }
    return made | changed


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": [1.0]}, "q must be a torch.Tensor, got list"),
    ({"q": torch.ones(2, 2, 4, 8)}, "q has batch 2 and k has batch 1"),
    ({"q": torch.ones(1, 2, 4, 9)}, "q has head_dim 9 and k has 8"),
    ({"v": torch.ones(1, 5, 2, 5)}, "k and v must agree in batch, slots and kv_heads"),
    ({"q": torch.ones(1, 2, 4, 8).int()}, "q must be one of bfloat16.*got int32"),
    ({"q_positions": torch.tensor([[3, 2**31]])}, "q_positions holds position 2147483648: positions must be below"),
    (
        {"k_positions": torch.zeros(1, 5, dtype=torch.int32)},
        r"k_positions must be \[batch, slots\] = \[1, 6\], got shape \[1, 5\]",
    ),
    ({"q_positions": None}, "q_positions must be a torch.Tensor, got None"),
    ({"tree_mask": torch.ones(1, 2, 2)}, "tree_mask must have dtype bool, got float32"),
    (
        {"tree_mask": torch.ones(1, 2, 2).bool(), "q_positions": torch.tensor([[3, 3]], dtype=torch.int32)},
        r"at q_positions p, p \+ 1, .* row 0 has \[3, 3\]",
    ),
    ({"window": 1.5}, "window must be int or None"),
    ({"window": [3]}, "numbers or None and backend is a name, got list"),
    ({"scale": math.nan}, "scale must be a finite"),
    ({"softcap": 0.0}, "softcap must be a Python number above 0"),
    ({"alibi_slopes": torch.ones(4).int()}, "alibi_slopes must have a floating dtype"),
    ({"k": torch.ones(1, 6, 2, 8, requires_grad=True)}, r"is for inference and has no gradient.*torch.no_grad\(\)"),
    ({"group": "everyone"}, "group must be a ProcessGroup"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_mistake_says_what_to_do(changed, message):
    with pytest.raises(ValueError, match=message):
        tree_attention_decode(**arrays(**changed))
    assert tree_attention_decode(**arrays()).shape == (1, 2, 4, 5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 3}, "disagree on window: None on rank 0, 3 on rank 1"),
        ({"q": torch.ones(1, 2, 2, 8)}, "disagree on q_shape"),
        ({"sinks": torch.ones(4)}, "disagree on arrays"),
        ({"tree_mask": torch.ones(1, 2, 3).bool()}, "rank 1: tree_mask must be"),
        ({"softcap": -1.0}, "rank 1: softcap must be"),
        ({"v": [1.0]}, "rank 1: v must be a torch.Tensor"),
    ],
    ids=str,
)
def test_all_ranks_raise_the_same(gloo, changed, message):
    gloo.refuse(message, 2, one_wrong, changed)
    assert gloo(2, one_wrong, {}) == [(1, 2, 4, 5)] * 2, "the ring works again"


def one_wrong(group, changed):
    if group in agreement._histories:
        agreement._histories[group].agreed.clear()
    return tuple(tree_attention_decode(**arrays(**(changed if dist.get_rank() == 1 else {})), group=group).shape)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((torch.ones(1, 2, 3, 4), torch.ones(1, 2)), r"got out \[1, 2, 3, 4\] and lse \[1, 2\]"),
        ((torch.ones(1, 2, 3, 4), 0.0), "lse must be a torch.Tensor"),
        (torch.ones(3), r"merge_ring takes a pair \(out, lse\)"),
        ((torch.ones(1, 2, 3, 4).int(), torch.ones(1, 2, 3)), "out must have a floating dtype"),
        ((torch.ones(1, 2, 3, 4, requires_grad=True), torch.ones(1, 2, 3)), "merge_ring is for inference"),
    ],
)
def test_merging_over_the_ring_refuses_an_invalid_pair(pair, message):
    with pytest.raises(ValueError, match=message):
        merge_ring(pair)
