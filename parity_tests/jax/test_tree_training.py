"""RingTransformer on rows of prefix trees: loss and gradients are those of every rollout alone."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_jax import (
    RingAttention,
    TracedLayout,
    from_layout,
    loss,
    pack_rollouts,
    shard_batch,
    to_layout,
    tree_extents,
)
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


@pytest.mark.parametrize("jitted", [False, True])
def test_shard_batch_assigns_the_segments_of_trees_to_ranks(jitted):
    tree = ((-1, 0, 0), (-1,)), ((9, 4, 5), (17,))
    call = lambda ids: shard_batch(ids, "balanced", 3, tree=tree)
    shard = (jax.jit(call) if jitted else call)(jnp.arange(40).reshape(2, 20))
    layout = balanced_tree_layout(*tree, 3, length=20)
    assert shard.layout == layout
    padded = np.pad(np.arange(40).reshape(2, 20), ((0, 0), (0, 1)))
    order = [position for rank in range(3) for position in layout.positions(rank)]
    np.testing.assert_array_equal(shard.ids, padded[:, order])
    for mine, expected in zip((shard.key_extents, shard.positions), tree_extents(*tree), strict=True):
        padded = np.zeros((2, 21, *expected.shape[2:]), np.int32)
        padded[:, : expected.shape[1]] = expected
        np.testing.assert_array_equal(mine, padded[:, order])


TREE: dict[str, Any] = {"key_extents": jnp.asarray([[[0, 6], [1, 6], [2, 4], [3, 4], [4, 6], [5, 6]]]), "longest_path": 4}
TREE["positions"] = jnp.asarray([[0, 1, 2, 3, 2, 3]])
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a shorter window": ({"mask": sliding_window(2)}, TREE, "a window of 3 tokens, itself included, .* its longest path has 4"),
    "slopes": (
        {"alibi": True, "rotary_base": None},
        TREE,
        "a tree came to a layer with ALiBi slopes, which count positions of the",
    ),
    "later tokens": ({"mask": full()}, TREE, "a tree goes with causal layers, and this layer has mask="),
    "a window alone": (
        {"mask": sliding_window(9)},
        TREE | {"longest_path": None},
        "key_extents came to a layer with a window, .*: pass longest_path=shard.longest_path beside them",
    ),
    "slopes alone": ({"alibi": True}, TREE | {"longest_path": None}, "key_extents came to a layer with ALiBi slopes"),
    "no positions": ({}, TREE | {"positions": None}, "a tree came without positions, .*: pass positions=shard.positions"),
    "no positions, a layout": ({}, TREE | {"positions": None, "layout": "contiguous"}, "a tree came without positions"),
    "no extents": ({}, TREE | {"key_extents": None}, "longest_path came without key_extents"),
    "no number": ({}, TREE | {"longest_path": 4.0}, "longest_path must be an int of at least 1, .* got 4.0"),
    "no path": ({}, TREE | {"longest_path": 0}, "longest_path must be an int of at least 1, .* got 0"),
}


def layer_with(**made: Any) -> RingAttention:
    return RingAttention(8, 2, layout="contiguous", mesh=mesh_of(1), rngs=nnx.Rngs(0), **made)


@pytest.mark.parametrize("case", REFUSED)
def test_a_layer_that_counts_positions_of_the_row_refuses_a_tree(case):
    made, given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        layer_with(**made)(jnp.ones((1, 6, 8)), **given)


def test_a_window_of_the_longest_path_hides_nothing_and_is_left_out():
    x = jax.random.normal(jax.random.key(0), (1, 6, 8))
    window, causally = (layer_with(mask=mask)(x, **TREE) for mask in (sliding_window(3), causal()))
    np.testing.assert_array_equal(window, causally)


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
