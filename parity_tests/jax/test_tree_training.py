"""RingTransformer on rows of prefix trees: loss and gradients are those of every rollout alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_jax import loss, pack_rollouts, shard_batch, to_layout
from ring_attn_jax.layers.transformer import RingTransformer

from ..support.rollouts import VOCAB, drawn_rollouts, loss_alone
from .ring import mesh_of


def model_on(ranks: int, layout: str) -> RingTransformer:
    sizes: dict[str, Any] = {"vocab": VOCAB, "dim": 16, "depth": 2, "heads": 2, "kv_heads": 1}
    return RingTransformer(**sizes, layout=layout, mesh=mesh_of(ranks), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("layout", "ranks"), [("zigzag", 2), pytest.param("striped", 4, marks=pytest.mark.exhaustive)])
def test_loss_and_gradients_of_a_tree_are_those_of_its_rollouts_alone(layout, ranks):
    drawn = drawn_rollouts(np.random.default_rng(3), 4, 10, VOCAB)
    packed = pack_rollouts(**drawn, length=40)
    shard = shard_batch(packed.ids, layout, ranks, labels=packed.labels, tree=(packed.parents, packed.lengths))
    weights = to_layout(packed.label_weights, layout, ranks)

    @nnx.value_and_grad
    def of_tree(model):
        logits = model(shard.ids, shard.positions, shard.length, key_extents=shard.key_extents)
        return loss(logits, shard.labels, label_weights=weights, reduction="sum", axis_name=None)

    longest = max(map(len, drawn["rollouts"]))
    ids = jnp.asarray([[*tokens, *[0] * (longest - len(tokens))] for tokens in drawn["rollouts"]])  # no token sees what follows

    @nnx.value_and_grad
    def alone(model):
        each = iter(jax.nn.log_softmax(model(ids)))
        return loss_alone(drawn, lambda _: next(each))

    mine, truth = nnx.jit(of_tree)(model_on(ranks, layout)), nnx.jit(alone)(model_on(1, "contiguous"))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_label_of_a_tree_stays_within_its_segment():
    shard = shard_batch(jnp.arange(7)[None], "contiguous", 1, tree=([-1, 0, 0], [2, 3, 1]))
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
        ({"tree": ([-1], [7]), "documents": jnp.zeros((2, 7), int)}, "documents and tree were given"),
    ],
)
def test_a_tree_that_does_not_fit_its_batch_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        shard_batch(jnp.zeros((2, 7), int), "zigzag", 2, 0, **arguments)
