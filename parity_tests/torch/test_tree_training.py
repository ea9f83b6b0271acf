"""RingTransformer on rows of prefix trees: loss and gradients are those of every rollout alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core import sliding_window
from ring_attn_core.layouts import LAYOUTS
from ring_attn_torch import RingAttention, loss, pack_rollouts, shard_batch, to_layout
from ring_attn_torch.layers.transformer import RingTransformer
from ring_attn_torch.ring.groups import Group, rank_in, ranks_of

from ..claims.test_trees import TREE
from ..support.rollouts import VOCAB, drawn_rollouts, loss_alone
from ..support.selection import first
from ..support.spawn import PerRank

LONGEST = 14
KEY_EXTENTS, POSITIONS = (torch.from_numpy(TREE[name]) for name in ("key_extents", "positions"))


def model_on(group: Group, layout: str) -> RingTransformer:
    """Its first layer has a window of LONGEST tokens, the rows have 40."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab": VOCAB, "dim": 16, "depth": 2, "heads": 2, "kv_heads": 1}
    own = "zigzag" if layout == "balanced" else layout  # a call takes the balanced layout of its shard
    return RingTransformer(**sizes, windows=[LONGEST - 1, None], layout=own, group=group).double()


def on_rank(group: Group, drawn: dict[str, Any], layout: str) -> list[np.ndarray]:
    model, packed, ranks, rank = model_on(group, layout), pack_rollouts(**drawn), ranks_of(group), rank_in(group)
    tree = packed.parents, packed.lengths
    shard = shard_batch(packed.ids, layout, ranks, rank, labels=packed.labels, tree=tree)
    weights = to_layout(packed.label_weights, shard.layout or layout, ranks).chunk(ranks, 1)[rank]
    extents: dict[str, Any] = {"key_extents": shard.key_extents, "longest_path": shard.longest_path, "layout": shard.layout}
    logits = model(shard.ids, shard.positions, shard.length, **extents)
    value = loss(logits, shard.labels, label_weights=weights, reduction="sum", group=group)
    return [x.detach().numpy() for x in (value / ranks, *torch.autograd.grad(value, [*model.parameters()]))]


@pytest.mark.parametrize("layout", [*LAYOUTS, "balanced"])
@pytest.mark.parametrize("ranks", first([1, 2, 4, 3], 2, 3))
def test_loss_and_gradients_of_a_tree_are_those_of_its_rollouts_alone(gloo, ranks, layout):
    drawn: dict[str, Any] = drawn_rollouts(np.random.default_rng(3), 6, LONGEST, VOCAB)
    assert max(map(len, drawn["rollouts"])) == LONGEST
    drawn["length"] = 40
    sums = [np.sum(x, 0) for x in zip(*gloo(ranks, on_rank, drawn, layout), strict=True)]
    model = model_on(None, "contiguous")
    logits = lambda ids: model(torch.tensor([ids]))[0]
    value = loss_alone(drawn, lambda ids: torch.log_softmax(logits(ids), -1))
    for mine, truth in zip(sums, (value, *torch.autograd.grad(value, [*model.parameters()])), strict=True):
        np.testing.assert_allclose(mine, truth.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_path_that_is_too_long_on_one_rank_is_every_ranks_error(gloo):
    gloo.refuse("^rank 1: a tree came to a layer with a window of 4 tokens", 2, attended_on_rank, PerRank(4, 5))


def attended_on_rank(group: Group, longest: int) -> None:
    layer = RingAttention(8, 2, layout="contiguous", mask=sliding_window(3), group=group)
    layer(torch.ones(1, 3, 8), torch.arange(3), key_extents=KEY_EXTENTS[:, :3], longest_path=longest)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1, 2]], "rank 1: positions must be a torch.Tensor, got list"),
        (torch.arange(2), "rank 1: positions of x .* must be"),
        (torch.arange(3.0), "rank 1: positions must be integers"),
    ],
)
def test_invalid_positions_on_one_rank_are_every_ranks_error(gloo, positions, message):
    gloo.refuse(f"^{message}", 2, model_on_rank, PerRank(torch.arange(3), positions))


def model_on_rank(group: Group, positions: Any) -> None:
    model = RingTransformer(9, 8, 1, 2, layout="contiguous", group=group)
    row = torch.tensor([[[0, 6], [1, 6], [2, 6]], [[3, 6], [4, 6], [5, 6]]])[[rank_in(group)]]
    positions = torch.arange(3, 6) if rank_in(group) == 0 else positions
    model(torch.zeros(1, 3, dtype=torch.long), positions, key_extents=row, longest_path=6)


@pytest.mark.parametrize("odd", [0, 1])
def test_key_extents_of_bool_on_one_rank_are_every_ranks_error_by_dtype(gloo, odd):
    dtypes = [torch.bool if rank == odd else torch.int32 for rank in range(2)]
    gloo.refuse(f"^rank {odd}: key_extents must have an integer dtype, got bool", 2, typed_on_rank, PerRank(*dtypes))


def typed_on_rank(group: Group, dtype: torch.dtype) -> None:
    rank = rank_in(group)
    model = RingTransformer(9, 8, 1, 2, layout="contiguous", group=group)
    key_extents = KEY_EXTENTS[:, 3 * rank : 3 * rank + 3].to(dtype)
    positions = POSITIONS[:, 3 * rank : 3 * rank + 3]
    model(torch.zeros(1, 3, dtype=torch.long), positions, key_extents=key_extents, longest_path=4)


TREES: dict[str, Any] = {
    "another completion": (([-1, 0, 0], [4, 7, 5]), ([-1, 0, 0], [4, 5, 7])),
    "another prompt": (([-1, 0, 0], [4, 6, 6]), ([-1, 0, 0], [3, 6, 7])),
    "another parent": (([-1, 0, 1, 0], [2, 3, 4, 3]), ([-1, 0, 0, 0], [2, 3, 4, 3])),
    "another longest path": (([-1, 0, 0], [8, 2, 2]), ([-1, 0, 0], [8, 3, 1])),
    "a shorter row": (([-1, 0, 0], [4, 4, 4]), ([-1, 0, 0], [4, 4, 1])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("case", "ranks"), first([(case, ranks) for ranks in (2, 4) for case in TREES], len(TREES), len(TREES) + 2)
)
def test_another_tree_on_one_rank_is_every_ranks_error_before_anything_is_sent(gloo, case, ranks, layout):
    one, other = TREES[case]
    sent = 0
    for odd in range(ranks):
        trees = PerRank(*(other if rank == odd else one for rank in range(ranks)))
        outcomes = gloo.outcomes(ranks, refused_on_rank, trees, layout)
        alike = {rank for rank in range(ranks) if same_shard(one, other, layout, ranks, rank)}
        if alike & {odd} or alike == {*range(ranks)} - {odd}:
            assert outcomes == [None] * ranks  # all shards are those of one of the two trees
            continue
        assert len(set(map(str, outcomes))) == 1
        assert isinstance(outcomes[0], ValueError)
        assert any(words in str(outcomes[0]) for words in ("hold shards of different trees", "disagree on longest_path"))
        sent += 1
    assert sent


def shard_of(tree: Any, layout: str, ranks: int, rank: int) -> list[torch.Tensor]:
    shard = shard_batch(torch.zeros(1, 16, dtype=torch.int64), layout, ranks, rank, tree=tree)
    assert shard.key_extents is not None
    return [shard.key_extents, shard.positions, torch.tensor(shard.longest_path)]


def same_shard(one: Any, other: Any, layout: str, ranks: int, rank: int) -> bool:
    return all(map(torch.equal, *(shard_of(tree, layout, ranks, rank) for tree in (one, other))))


def refused_on_rank(group: Group, tree: Any, layout: str) -> None:
    key_extents, positions, longest = shard_of(tree, layout, ranks_of(group), rank_in(group))
    ids = torch.zeros_like(positions, dtype=torch.int64)
    with torch.no_grad():
        model_on(group, layout)(ids, positions, 16, key_extents=key_extents, longest_path=longest.item())


def balanced_on_rank(group: Group, tree: Any, of_layout: Any) -> None:
    ids, ranks, rank = torch.zeros(1, 16, dtype=torch.int64), ranks_of(group), rank_in(group)
    layout = shard_batch(ids, "balanced", ranks, rank, tree=of_layout).layout
    assert layout is not None
    shard = shard_batch(ids, layout, ranks, rank, tree=tree)
    extents: dict[str, Any] = {"key_extents": shard.key_extents, "longest_path": shard.longest_path, "layout": layout}
    with torch.no_grad():
        model_on(group, "balanced")(shard.ids, shard.positions, shard.length, **extents)


def test_in_a_balanced_layout_another_tree_or_layout_on_one_rank_is_every_ranks_error(gloo):
    one, other = TREES["another completion"]
    for trees, layouts, words in (
        (PerRank(one, other), one, "hold shards of different trees"),
        (one, PerRank(one, other), "disagree on layout: 'balanced over 2 ranks, length 16, runs"),
        (one, PerRank(one, other), "Pass the same on every rank, and the same documents: a balanced layout is made of them"),
    ):
        gloo.refuse(words, 2, balanced_on_rank, trees, layouts)
    gloo(2, balanced_on_rank, other, one)  # any layout of the length holds any tree


@pytest.mark.parametrize("of_tree", [True, False])
def test_the_name_of_the_balanced_layout_on_one_rank_is_every_ranks_error(gloo, of_tree):
    gloo.refuse("^rank 1: a balanced layout follows from documents", 2, named_on_rank, PerRank(None, "balanced"), of_tree)


def named_on_rank(group: Group, layout: Any, of_tree: bool) -> None:
    ids, tree = torch.zeros(1, 16, dtype=torch.int64), TREES["another completion"][0]
    shard = shard_batch(ids, "zigzag", 2, rank_in(group), tree=tree)
    extents: Any = {"key_extents": shard.key_extents, "longest_path": shard.longest_path} if of_tree else {}
    model_on(group, "zigzag")(shard.ids, None, shard.length, layout=layout, **extents)


def test_positions_of_another_tree_are_refused_on_a_ring_of_one():
    model, (one, other) = model_on(None, "contiguous"), TREES["another prompt"]
    shard, odd = (shard_batch(torch.zeros(1, 16, dtype=torch.int64), "contiguous", 1, tree=tree) for tree in (one, other))
    with pytest.raises(ValueError, match=r"position 9 .* has 9 ancestors by its key extents, and positions say 3"):
        model(shard.ids, odd.positions, shard.length, key_extents=shard.key_extents, longest_path=shard.longest_path)
