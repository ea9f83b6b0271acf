"""Prefix trees: attention, GRPO and layers over the rows of a tree are those of every rollout alone, or refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.data.balanced_trees import balanced_tree_layout

from ..support.models import assert_near
from ..support.rollouts import Policy, policy
from ..support.selection import first, in_each
from .framework import library


@in_each("heads", jax=first([2], 0), torch=[2])
def test_attention_over_the_tree_is_that_of_every_rollout_alone(framework, heads):
    of = policy()
    q = framework.array(np.random.default_rng(1).standard_normal((*of.packed.ids.shape, heads, 4), np.float32))
    attention = framework.compiled(partial(framework.alone("ring_attention"), layout="contiguous"))
    tree = attention(q, q, q, key_extents=framework.tree_extents(*of.packed.tree).key_extents)
    longest = max(map(len, of.alone(q)))
    for out, alone in zip(of.alone(tree), of.alone(q), strict=True):
        rows = (0, longest - len(alone)), (0, 0), (0, 0)  # the mask is causal: one program for all
        wide = framework.array(np.pad(np.asarray(alone), rows)[None])
        np.testing.assert_allclose(out, attention(wide, wide, wide)[0, : len(alone)], rtol=1e-5, atol=1e-6)


def test_arrays_are_of_the_dtypes_of_a_shard(framework):
    named = lambda x: str(x.dtype).removeprefix("torch.")
    key_extents, positions = framework.tree_extents([-1, 0, 0], [2, 1, 3])
    assert named(key_extents) == named(positions) == "int32"
    assert tuple(key_extents.shape) == (1, 6, 2)
    weights = [*framework.array(np.array([0.5, 2]), "bfloat16")]
    packed = framework.pack_rollouts([framework.array(np.array([1, 2, 3])), [1, 2, 4]], weights=weights)
    index = "int32" if framework.name == "jax" else "int64"
    assert {named(x) for x in (packed.ids, packed.labels, packed.predictors)} == {index}
    assert (named(packed.label_weights), named(packed.positions)) == ("float32", "int32")
    assert packed.label_weights.tolist() == [[2.5, 0.5, 0, 2, 0]]
    np.testing.assert_array_equal(framework.tree_extents(*packed.tree).positions, packed.positions)


@in_each("count", jax=[10], torch=[300])
def test_whole_values_come_back_per_rollout_and_gradients_add_in_float32(framework, count):
    rollouts = [[1, 2, 3 + i] for i in range(count)]
    packed = framework.pack_rollouts(rollouts)
    assert [tokens.tolist() for tokens in framework.unpack_rollouts(packed.ids, packed)] == [each[:-1] for each in rollouts]
    values = framework.array(np.ones(packed.ids.shape), "bfloat16")
    _, (gradient,) = framework.pull(lambda values: tuple(framework.unpack_rollouts(values, packed)), [values])
    assert gradient[0, 0] == count  # a sum of ones in bfloat16 ends at 256
    for features in (4, 0):
        whole = framework.array(np.ones((*packed.ids.shape, features)))
        assert tuple(framework.unpack_rollouts(whole, packed)[7].shape) == (2, features)


RINGS = [(3, "balanced"), (1, None), (4, "zigzag"), (1, "zigzag"), (2, "zigzag"), (2, "striped"), (4, "contiguous")]


@in_each("ranks,layout", jax=first([(2, "traced"), *RINGS], 1, 4), torch=RINGS, slow="jax")
def test_grpo_on_a_ring_has_the_loss_and_gradient_of_its_rollouts_alone(framework, ranks, layout):
    of = policy()
    if layout in ("balanced", "traced"):
        dealt = balanced_tree_layout(*of.packed.tree, ranks)
        layout = framework.TracedLayout.of(dealt) if layout == "traced" else dealt
    call = partial(on_ring, framework.token_log_probs, framework.unpack_rollouts, of, layout)
    with framework.x64():
        if layout is None:
            values, (dx, *rest) = framework.pull(partial(call, labels=of.packed.labels), [of.x, of.weight, of.head])
        else:
            x, labels = (framework.to_layout(framework.array(x), layout, ranks) for x in (of.x, of.packed.labels))
            values, (dx, *rest) = framework.over_ring(ranks, call, [x], [of.weight, of.head], [np.ones(())], labels=labels)
            dx = framework.numpy(framework.from_layout(framework.array(dx), layout, ranks, of.x.shape[1]))
        truth = framework.pull(partial(alone, of), [of.x, of.weight, of.head])
    named = lambda values, gradients: dict[str, Any](zip(("loss", "dx", "dweight", "dhead"), (*values, *gradients), strict=True))
    assert_near(named(values, (dx, *rest)), named(*truth), 1e-13)


def on_ring(
    log_probs: Any, unpack: Any, of: Policy, layout: Any, x: Any, weight: Any, head: Any, *, labels: Any, **ring: Any
) -> Any:
    xp = library(x)
    packed = replace(of.packed, predictors=xp.asarray(of.packed.predictors))
    values = log_probs(xp.tanh(x @ weight), xp.asarray(labels), head=head, chunk=5, entropy=True)
    return grpo(of, *(unpack(each, packed, layout=layout, **ring) for each in values))


def alone(of: Policy, x: Any, weight: Any, head: Any) -> Any:
    """Each rollout by itself, with the features of its tokens and all of its logits."""
    xp = library(x)
    logits = [xp.tanh(each @ weight) @ head.T for each in of.alone(x)]
    every = [each - xp.log(xp.exp(each).sum(-1)[:, None]) for each in logits]
    logp = [each[np.arange(len(each)), np.array(tokens[1:])] for each, tokens in zip(every, of.rollouts, strict=True)]
    return grpo(of, logp, [-(xp.exp(each) * each).sum(-1) for each in every])


def grpo(of: Policy, logp: list[Any], entropies: list[Any]) -> Any:
    """The clipped objective, a mean over each rollout's tokens, with an entropy bonus."""
    total, xp = 0, library(logp[0])
    for new, old, entropy, advantage in zip(logp, of.old, entropies, of.advantages.tolist(), strict=True):
        ratio = xp.exp(new - xp.asarray(old))
        clipped = xp.minimum(ratio * advantage, xp.clip(ratio, 0.8, 1.2) * advantage)
        total = total - (clipped + 0.01 * entropy).mean()
    return total


@pytest.mark.parametrize("rank", [None, 1])
def test_shard_batch_assigns_the_segments_of_trees_to_ranks(framework, rank):
    tree, ids = (((-1, 0, 0), (-1,)), ((9, 4, 5), (17,))), np.arange(40).reshape(2, 20)
    call = lambda ids: framework.shard_batch(ids, "balanced", 3, rank, tree=tree)
    shard = (framework.compiled(call) if rank is None else call)(framework.array(ids))
    layout = balanced_tree_layout(*tree, 3, length=20)
    assert shard.layout == layout
    order = [position for each in (range(3) if rank is None else [rank]) for position in layout.positions(each)]
    np.testing.assert_array_equal(np.asarray(shard.ids), np.pad(ids, ((0, 0), (0, 1)))[:, order])
    for mine, expected in zip((shard.key_extents, shard.positions), framework.tree_extents(*tree), strict=True):
        padded = np.zeros((2, 21, *expected.shape[2:]), np.int32)
        padded[:, : expected.shape[1]] = np.asarray(expected)
        np.testing.assert_array_equal(np.asarray(mine), padded[:, order])


TREE: dict[str, Any] = {"longest_path": 4, "positions": np.array([[0, 1, 2, 3, 2, 3]])}
TREE["key_extents"] = np.array([[[0, 6], [1, 6], [2, 4], [3, 4], [4, 6], [5, 6]]])
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a shorter window": ({"mask": sliding_window(2)}, {}, "a window of 3 tokens, itself included, .* its longest path has 4"),
    "slopes": ({"alibi": True, "rotary_base": None}, {}, "a tree came to a layer with ALiBi slopes, which count positions of"),
    "later tokens": ({"mask": full()}, {}, "a tree goes with causal layers, and this layer has mask="),
    "a window alone": (
        {"mask": sliding_window(9)},
        {"longest_path": None},
        "key_extents came to a layer with a window, .*: pass longest_path=shard.longest_path beside them",
    ),
    "slopes alone": ({"alibi": True}, {"longest_path": None}, "key_extents came to a layer with ALiBi slopes"),
    "no positions": ({}, {"positions": None}, "a tree came without positions, .*: pass positions=shard.positions"),
    "no positions, a layout": ({}, {"positions": None, "layout": "contiguous"}, "a tree came without positions"),
    "no extents": ({}, {"key_extents": None}, "longest_path came without key_extents"),
    "no number": ({}, {"longest_path": 4.0}, "longest_path must be an int of at least 1, .* got 4.0"),
    "no path": ({}, {"longest_path": 0}, "longest_path must be an int of at least 1, .* got 0"),
}


def layer_with(framework: Any, **made: Any) -> Any:
    return framework.make("RingAttention", 8, 2, layout="contiguous", **framework.ring(1), **made)


@pytest.mark.parametrize(("made", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_layer_that_counts_positions_of_the_row_refuses_a_tree(framework, made, given, message):
    with pytest.raises(ValueError, match=message):
        layer_with(framework, **made)(framework.array(np.ones((1, 6, 8), np.float32)), **framework.arrays(TREE | given))


def test_a_window_of_the_longest_path_hides_nothing_and_is_left_out(framework):
    x = framework.array(np.random.default_rng(0).standard_normal((1, 6, 8), np.float32))
    window, causally = (layer_with(framework, mask=mask) for mask in (sliding_window(3), causal()))
    framework.from_numpy(causally, framework.to_numpy(window))
    assert (window(x, **framework.arrays(TREE)) == causally(x, **framework.arrays(TREE))).all()
