"""Prefix trees in PyTorch: extents as tensors, and values of rollouts on every rank, whose gradient is that of rollouts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_torch import gather, gather_token, pack_rollouts, to_layout, unpack_rollouts

from ..support.rollouts import Policy, policy
from ..support.selection import first
from ..support.spawn import PerRank
from .models import Group, rank_in


@pytest.mark.parametrize("balanced", [False, True])
def test_values_of_a_shard_are_those_of_whole_rows(gloo, balanced):
    of = policy()
    layout = balanced_tree_layout(*of.packed.tree, 4) if balanced else "zigzag"
    for same in gloo(4, same_on_rank, of, layout):
        assert same


def same_on_rank(group: Group, of: Policy, layout: Any) -> bool:
    """``gather`` gives the whole values; what padding holds is NaN, and may not matter."""
    packed = pack_rollouts(of.rollouts, length=13)
    shard = to_layout(torch.from_numpy(of.x), layout, 4, pad_value=torch.nan).chunk(4, 1)[rank_in(group)]
    mine = unpack_rollouts(shard, packed, group=group, layout=layout)
    whole = unpack_rollouts(gather(shard, group=group, layout=layout, length=of.x.shape[1]), packed)
    last = gather_token(shard, -2, group=group, layout=layout, length=of.x.shape[1])
    return all(torch.equal(a, b) for a, b in zip([*mine, last], [*whole, torch.from_numpy(of.x[:, -2])], strict=True))


PACKED = pack_rollouts([[1, 2, 3], [1, 2, 4]])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("layout", first(["zigzag", balanced_tree_layout(*PACKED.tree, 2)]), ids=["zigzag", "balanced"])
def test_unpack_compiles_as_one_graph(gloo, layout):
    assert gloo(2, compiled_on_rank, layout) == [True, True]


def compiled_on_rank(group: Group, layout: Any) -> bool:
    objective = lambda x: torch.cat(unpack_rollouts(x, PACKED, group=group, layout=layout)).sin().sum()
    gradients = []
    for function in (objective, torch.compile(objective, fullgraph=True, backend="aot_eager")):
        x = (torch.arange(4.0 if layout == "zigzag" else 3.0)[None] * (1 + rank_in(group))).requires_grad_()
        gradients += torch.autograd.grad(function(x), x)
    return torch.equal(*gradients)


def test_a_shard_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="x holds 5 tokens, and of length=5 over 1 ranks in zigzag a shard has 6"):
        unpack_rollouts(torch.ones(1, 5), PACKED, layout="zigzag")
    with pytest.raises(ValueError, match="unknown layout 'spiral'"):
        unpack_rollouts(torch.ones(1, 6), PACKED, layout="spiral")


def test_one_ranks_mistake_is_everybodys_error(gloo):
    words = "^rank 1: x holds 5 tokens, and of length=5 over 2 ranks in zigzag a shard has 4"
    gloo.refuse(words, 2, mistaken_on_rank, PerRank(4, 5))


def test_a_layout_that_one_rank_forgets_is_every_ranks_error(gloo):
    for rank in range(2):
        words = rf"^rank {rank}: values must be \[1, 5, ...\], one for each token of the rollouts' rows.*pass layout= for this"
        gloo.refuse(words, 2, mistaken_on_rank, 4, PerRank(*(None if each == rank else "zigzag" for each in range(2))))


def mistaken_on_rank(group: Group, tokens: int, layout: Any = "zigzag") -> None:
    unpack_rollouts(torch.ones(1, tokens), PACKED, group=group, layout=layout)


def test_a_balanced_layout_that_does_not_fit_or_differs_is_every_ranks_error(gloo):
    own, longer, other = (balanced_tree_layout(*PACKED.tree, 2, length=n) for n in (5, 7, 5))
    other = replace(own, runs=own.runs[::-1])
    for tokens, layout, message in (
        (3, PerRank(own, longer), "rank 1: this layout deals 7 tokens to 2 ranks, got 5 tokens and 2 ranks"),
        (PerRank(3, 4), own, "rank 1: x holds 4 tokens, and of length=5 over 2 ranks in balanced over 2 ranks, length 5"),
        (3, PerRank(own, other), "the ranks of this ring disagree on layout: 'balanced over 2 ranks, length 5, runs"),
    ):
        gloo.refuse(f"^{message}", 2, mistaken_on_rank, tokens, layout)


def test_other_rollouts_on_one_rank_are_every_ranks_error_at_every_call(gloo):
    words = r"^the ranks of this ring disagree on rollouts: '.*' on rank 0, '.*' on rank 3\. Pass the same"
    gloo.refuse(words, 4, other_rollouts_on_rank, PerRank(4, 4, 4, 5))


def other_rollouts_on_rank(group: Group, token: int) -> None:
    for last in (4, token):
        unpack_rollouts(torch.ones(1, 2), pack_rollouts([[1, 2, 3], [1, 2, last]]), group=group, layout="zigzag")
