"""RingTransformer on rows of prefix trees: loss and gradients are those of every rollout alone."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_jax import TracedLayout, from_layout, loss, pack_rollouts, shard_batch, to_layout
from ring_attn_jax.layers.transformer import RingTransformer

from ..support.rollouts import VOCAB, drawn_rollouts, loss_alone
from ..support.selection import first
from .ring import mesh_of

LONGEST = 10


def model_on(ranks: int, layout: str) -> RingTransformer:
    """Its first layer has a window of LONGEST tokens, the rows have more."""
    sizes: dict[str, Any] = {"vocab": VOCAB, "dim": 16, "depth": 2, "heads": 2, "kv_heads": 1, "windows": [LONGEST - 1, None]}
    own = "zigzag" if layout == "balanced" else layout  # a call takes the balanced layout of its shard
    return RingTransformer(**sizes, layout=own, mesh=mesh_of(ranks), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("layout", "ranks"), first([("balanced", 3), ("zigzag", 2), ("contiguous", 1), ("striped", 4)], 0, 2))
def test_loss_and_gradients_of_a_tree_are_those_of_its_rollouts_alone(layout, ranks):
    drawn = drawn_rollouts(np.random.default_rng(3), 4, LONGEST, VOCAB)
    packed = pack_rollouts(**drawn, length=40)
    shard = shard_batch(packed.ids, layout, ranks, labels=packed.labels, tree=(packed.parents, packed.lengths))
    weights = to_layout(packed.label_weights, shard.layout or layout, ranks)

    @partial(nnx.value_and_grad, argnums=0)
    def of_tree(model, shard):
        tree = {"key_extents": shard.key_extents, "longest_path": shard.longest_path, "layout": shard.layout}
        logits = model(shard.ids, shard.positions, shard.length, **tree)
        return loss(logits, shard.labels, label_weights=weights, reduction="sum", axis_name=None)

    assert packed.ids.shape[1] > LONGEST
    mine = nnx.jit(of_tree)(model_on(ranks, layout), shard)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(alone()), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@cache
def alone() -> Any:
    """The loss and gradients of the rollouts by themselves."""
    drawn = drawn_rollouts(np.random.default_rng(3), 4, LONGEST, VOCAB)
    longest = max(map(len, drawn["rollouts"]))
    assert longest == LONGEST
    ids = jnp.asarray([[*tokens, *[0] * (longest - len(tokens))] for tokens in drawn["rollouts"]])  # no token sees what follows

    @nnx.value_and_grad
    def of_each(model):
        each = iter(jax.nn.log_softmax(model(ids)))
        return loss_alone(drawn, lambda _: next(each))

    return nnx.jit(of_each)(model_on(1, "contiguous"))


@pytest.mark.exhaustive
def test_a_model_takes_the_layout_of_another_tree_without_compiling_anew():
    compiled, ids = [], jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (1, 20)))

    @nnx.jit
    def dealt(model, ids, positions, key_extents, layout):
        compiled.append(layout)
        return model(ids, positions, layout.length, key_extents=key_extents, layout=layout, longest_path=9)

    for tree in (([-1, 0, 0], [5, 4, 4]), ([-1, -1, 1, 1], [3, 6, 1, 3])):
        shard, one = (shard_batch(ids, layout, ranks, tree=tree) for layout, ranks in (("balanced", 3), ("contiguous", 1)))
        assert shard.layout is not None
        logits = dealt(model_on(3, "zigzag"), shard.ids, shard.positions, shard.key_extents, TracedLayout.of(shard.layout))
        alone = model_on(1, "contiguous")(one.ids, one.positions, one.length, key_extents=one.key_extents, longest_path=9)
        held = sum(tree[1])
        np.testing.assert_allclose(from_layout(logits, shard.layout, 3, 20)[:, :held], alone[:, :held], rtol=2e-4, atol=2e-4)
    assert len(compiled) == 1


def test_a_jitted_function_takes_a_shard_whole():
    known = []

    @jax.jit
    def total(shard):
        known.append((shard.length, shard.longest_path))
        return shard.ids.sum()

    for parents in ([-1, 0, 0], [-1, -1, 1]):
        total(shard_batch(jnp.arange(6)[None], "zigzag", 1, tree=(parents, [2, 3, 1])))
    assert known == [(6, 5), (6, 4)]
    leaves = jax.tree_util.tree_leaves_with_path(shard_batch(jnp.arange(6)[None], "zigzag", 1))
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [".ids", ".labels", ".positions"]
