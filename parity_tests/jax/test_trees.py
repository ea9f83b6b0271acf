"""Prefix trees in JAX: extents as arrays, and values of rollouts on every rank, whose gradient is that of rollouts alone."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_jax import (
    TracedLayout,
    from_layout,
    gather,
    gather_token,
    pack_rollouts,
    sharded_ring_attention,
    to_layout,
    token_log_probs,
    tree_extents,
    unpack_rollouts,
)

from ..support.models import assert_near
from ..support.rollouts import Policy, policy
from ..support.selection import first
from .models import REPLICATED
from .ring import SEQ, mesh_of


def test_arrays_are_of_the_dtypes_of_a_shard():
    key_extents, positions = tree_extents([-1, 0, 0], [2, 1, 3])
    assert key_extents.dtype == positions.dtype == jnp.int32
    assert key_extents.shape == (1, 6, 2)
    packed = pack_rollouts([jnp.array([1, 2, 3]), [1, 2, 4]], weights=[*jnp.array([0.5, 2], jnp.bfloat16)])
    assert packed.ids.dtype == packed.labels.dtype == packed.predictors.dtype == packed.positions.dtype == jnp.int32
    assert packed.label_weights.dtype == jnp.float32
    assert packed.label_weights.tolist() == [[2.5, 0.5, 0, 2, 0]]
    np.testing.assert_array_equal(tree_extents(*packed.tree).positions, packed.positions)


@pytest.mark.exhaustive
def test_attention_over_the_tree_is_that_of_every_rollout_alone():
    of = policy()
    q = jnp.asarray(np.random.default_rng(1).standard_normal((*of.packed.ids.shape, 2, 4)), jnp.float32)
    attention = partial(sharded_ring_attention, mesh=mesh_of(1), layout="contiguous")
    tree = attention(q, q, q, key_extents=tree_extents(*of.packed.tree).key_extents)
    longest = max(map(len, of.alone(q)))
    for out, alone in zip(of.alone(tree), of.alone(q), strict=True):
        wide = jnp.pad(alone, ((0, longest - len(alone)), (0, 0), (0, 0)))[None]  # the mask is causal; one program for all
        np.testing.assert_allclose(out, attention(wide, wide, wide)[0, : len(alone)], rtol=1e-5, atol=1e-6)


def test_rollouts_packed_under_explicit_axes_are_unpacked_in_a_shard_map():
    mesh = jax.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        packed = pack_rollouts([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7, 8]])
        values = jax.device_put(to_layout(packed.positions, "zigzag", 2), jax.NamedSharding(mesh, SEQ))
        unpack = lambda values: unpack_rollouts(values, packed, layout="zigzag")
        each = jax.jit(jax.shard_map(unpack, in_specs=SEQ, out_specs=REPLICATED))(values)
    assert [x.tolist() for x in each] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("count", first([10, 300], 1, 1))
def test_whole_values_come_back_per_rollout_and_gradients_add_in_float32(count):
    rollouts = [[1, 2, 3 + i] for i in range(count)]
    packed = pack_rollouts(rollouts)
    for i, tokens in enumerate(unpack_rollouts(packed.ids, packed)):
        assert tokens.tolist() == rollouts[i][:-1]
    values = jnp.ones(packed.ids.shape, jnp.bfloat16)
    step = jax.grad(lambda values: jnp.concatenate(unpack_rollouts(values, packed)).astype(jnp.float32).sum())
    assert step(values)[0, 0] == count  # a sum of 300 ones in bfloat16 ends at 256, but XLA's on a CPU does not
    assert re.search(r"f32\[\d+\] = scatter-add", str(jax.make_jaxpr(step)(values)))
    for features in (4, 0):
        assert unpack_rollouts(jnp.ones((*packed.ids.shape, features)), packed)[7].shape == (2, features)


def test_a_jitted_function_takes_rollouts_as_a_pytree():
    calls = []

    @jax.jit
    def total(values, packed):
        calls.append(packed.tree)
        return sum(x.sum() for x in unpack_rollouts(values, packed))

    for rollouts in ([[1, 2, 3], [1, 2, 4]], [[5, 6, 7], [5, 6, 8]]):
        packed = pack_rollouts(rollouts)
        assert total(packed.ids, packed) == sum(rollouts[0][:2] + rollouts[1][:2])
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    first(
        [
            (2, "traced"),
            (1, None),
            (3, "balanced"),
            (4, "zigzag"),
            (1, "zigzag"),
            (2, "zigzag"),
            (2, "striped"),
            (4, "contiguous"),
        ],
        1,
        4,
    ),
)
def test_grpo_on_a_ring_has_the_loss_and_gradient_of_its_rollouts_alone(ranks, layout):
    of = policy()
    if layout in ("balanced", "traced"):
        dealt = balanced_tree_layout(*of.packed.tree, ranks)
        layout = TracedLayout.of(dealt) if layout == "traced" else dealt
    with jax.enable_x64(True):
        shards = lambda x: jnp.asarray(x) if layout is None else to_layout(jnp.asarray(x), layout, ranks)
        step = jax.value_and_grad(partial(on_ring, of, layout), (0, 1, 2))
        specs = (SEQ, REPLICATED, REPLICATED, SEQ), (REPLICATED, (SEQ, REPLICATED, REPLICATED))
        if layout is not None:
            step = jax.shard_map(step, mesh=mesh_of(ranks), in_specs=specs[0], out_specs=specs[1])
        value, (dx, *rest) = jax.jit(step)(shards(of.x), of.weight, of.head, shards(of.packed.labels))
        dx = dx if layout is None else from_layout(dx, layout, ranks, of.x.shape[1])
        assert_near(named(value, (dx, *rest)), truth(), 1e-13)


@cache
def truth() -> dict[str, np.ndarray]:
    of = policy()
    of_each = jax.jit(jax.value_and_grad(partial(alone, of), (0, 1, 2)))
    return named(*of_each(*map(jnp.asarray, (of.x, of.weight, of.head))))


def on_ring(of: Policy, layout: Any, x: Any, weight: Any, head: Any, labels: Any) -> jax.Array:
    packed = replace(of.packed, predictors=jnp.asarray(of.packed.predictors))
    values = token_log_probs(jnp.tanh(x @ weight), labels, head=head, chunk=5, entropy=True)
    return grpo(of, *(unpack_rollouts(each, packed, layout=layout) for each in values))


def alone(of: Policy, x: Any, weight: Any, head: Any) -> jax.Array:
    """Each rollout by itself, with the features of its tokens and all of its logits."""
    every = [jax.nn.log_softmax(jnp.tanh(each @ weight) @ head.T) for each in of.alone(x)]
    logp = [each[np.arange(len(each)), np.array(tokens[1:])] for each, tokens in zip(every, of.rollouts, strict=True)]
    return grpo(of, logp, [-(jnp.exp(each) * each).sum(-1) for each in every])


def grpo(of: Policy, logp: list[jax.Array], entropies: list[jax.Array]) -> jax.Array:
    """The clipped objective, a mean over each rollout's tokens, with an entropy bonus."""
    total = jnp.zeros(())
    for new, old, entropy, advantage in zip(logp, of.old, entropies, of.advantages, strict=True):
        ratio = jnp.exp(new - old)
        clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        total = total - (clipped + 0.01 * entropy).mean()
    return total


def named(value: Any, gradients: Any) -> dict[str, np.ndarray]:
    return {"loss": np.asarray(value)} | dict(zip(("dx", "dweight", "dhead"), map(np.asarray, gradients), strict=True))


def test_a_derivative_where_jax_sums_no_gradients_is_refused():
    packed = pack_rollouts([[1, 2, 3], [1, 2, 4]])
    total = lambda x: sum(each.sum() for each in unpack_rollouts(x, packed, layout="zigzag"))
    over_ranks = lambda call, out: jax.jit(jax.shard_map(call, mesh=mesh_of(2), in_specs=SEQ, out_specs=out, check_vma=False))
    shards = to_layout(packed.ids.astype(jnp.float32), "zigzag", 2)
    assert over_ranks(total, REPLICATED)(shards) == 6
    with pytest.raises(ValueError, match=r"unpack_rollouts has no derivative inside jax.shard_map\(check_vma=False\)"):
        over_ranks(jax.grad(total), SEQ)(shards)


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_values_and_tokens_are_gathered_from_a_balanced_layout(traced):
    dealt = balanced_tree_layout([-1, 0, 0], [4, 2, 3], 2)
    layout, x = TracedLayout.of(dealt) if traced else dealt, jnp.arange(9)[None]
    both = lambda x: (
        gather(x, layout=layout),
        gather_token(x, -2, layout=layout),
        gather_token(x, jnp.array([3]), layout=layout),
    )
    found = jax.jit(jax.shard_map(both, mesh=mesh_of(2), in_specs=SEQ, out_specs=REPLICATED))(to_layout(x, layout, 2))
    for mine, expected in zip(found, (x, x[:, 7], x[:, 3]), strict=True):
        np.testing.assert_array_equal(mine, expected)


PACKED = pack_rollouts([[1, 2, 3], [1, 2, 4]])


def test_a_shard_that_does_not_fit_is_refused():
    inside = partial(unpack_rollouts, rollouts=PACKED, layout="zigzag")
    with pytest.raises(ValueError, match=r"'seq' is not a mesh axis here: call unpack_rollouts inside .* leave layout out"):
        inside(jnp.ones((1, 6)))
    with pytest.raises(ValueError, match="x holds 5 tokens, and of length=5 over 1 ranks in zigzag a shard has 6"):
        jax.shard_map(inside, mesh=mesh_of(1), in_specs=SEQ, out_specs=REPLICATED)(jnp.ones((1, 5)))
