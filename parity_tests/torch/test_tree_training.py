"""RingTransformer on rows of prefix trees: loss and gradients are those of every rollout alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core.layouts import LAYOUTS
from ring_attn_torch import loss, pack_rollouts, shard_batch, to_layout
from ring_attn_torch.layers.transformer import RingTransformer
from ring_attn_torch.ring.groups import Group, rank_in, ranks_of

from ..support.rollouts import VOCAB, drawn_rollouts, loss_alone


def model_on(group: Group, layout: str) -> RingTransformer:
    torch.manual_seed(0)
    return RingTransformer(vocab=VOCAB, dim=16, depth=2, heads=2, kv_heads=1, layout=layout, group=group).double()


def on_rank(group: Group, drawn: dict[str, Any], layout: str) -> list[np.ndarray]:
    model, packed, ranks, rank = model_on(group, layout), pack_rollouts(**drawn), ranks_of(group), rank_in(group)
    tree = packed.parents, packed.lengths
    shard = shard_batch(packed.ids, layout, ranks, rank, labels=packed.labels, tree=tree)
    weights = to_layout(packed.label_weights, layout, ranks).chunk(ranks, 1)[rank]
    logits = model(shard.ids, shard.positions, shard.length, key_extents=shard.key_extents)
    value = loss(logits, shard.labels, label_weights=weights, reduction="sum", group=group)
    return [x.detach().numpy() for x in (value / ranks, *torch.autograd.grad(value, [*model.parameters()]))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_loss_and_gradients_of_a_tree_are_those_of_its_rollouts_alone(gloo, ranks, layout):
    drawn = drawn_rollouts(np.random.default_rng(3), 6, 14, VOCAB) | {"length": 40}
    sums = [np.sum(x, 0) for x in zip(*gloo(ranks, on_rank, drawn, layout), strict=True)]
    model = model_on(None, "contiguous")
    logits = lambda ids: model(torch.tensor([ids]))[0]
    value = loss_alone(drawn, lambda ids: torch.log_softmax(logits(ids), -1))
    for mine, truth in zip(sums, (value, *torch.autograd.grad(value, [*model.parameters()])), strict=True):
        np.testing.assert_allclose(mine, truth.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_label_of_a_tree_stays_within_its_segment():
    shard = shard_batch(torch.arange(7)[None], "contiguous", 1, tree=([-1, 0, 0], [2, 3, 1]))
    assert shard.labels.tolist() == [[1, -100, 3, 4, -100, -100, -100]]
    assert shard.positions.tolist() == [[0, 1, 2, 3, 4, 2, 0]]
    assert shard.key_extents is not None
    assert shard.key_extents[0].tolist() == [[0, 6], [1, 6], [2, 5], [3, 5], [4, 5], [5, 6], [0, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tree": ([-1], [9])}, "a row of the tree has 9 tokens, and ids have 7"),
        ({"tree": 3}, r"tree must be a pair \(parents, lengths\)"),
        ({"tree": ([[-1]] * 3, [[7]] * 3)}, "tree has 3 rows and ids have 2"),
        ({"tree": ([-1], [7]), "documents": torch.zeros(2, 7, dtype=torch.int64)}, "documents and tree were given"),
    ],
)
def test_a_tree_that_does_not_fit_its_batch_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        shard_batch(torch.zeros(2, 7, dtype=torch.int64), "zigzag", 2, 0, **arguments)
