"""Prefix trees in JAX: extents as arrays, and values of rollouts on every rank, whose gradient is that of rollouts alone."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_jax import TracedLayout, gather, gather_token, pack_rollouts, to_layout, unpack_rollouts

from .models import REPLICATED
from .ring import SEQ, mesh_of


def test_rollouts_packed_under_explicit_axes_are_unpacked_in_a_shard_map():
    mesh = jax.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        packed = pack_rollouts([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7, 8]])
        values = jax.device_put(to_layout(packed.positions, "zigzag", 2), jax.NamedSharding(mesh, SEQ))
        unpack = lambda values: unpack_rollouts(values, packed, layout="zigzag")
        each = jax.jit(jax.shard_map(unpack, in_specs=SEQ, out_specs=REPLICATED))(values)
    assert [x.tolist() for x in each] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_gradients_of_bfloat16_values_add_in_float32():
    packed = pack_rollouts([[1, 2, 3 + i] for i in range(10)])
    step = jax.grad(lambda values: jnp.concatenate(unpack_rollouts(values, packed)).astype(jnp.float32).sum())
    program = jax.make_jaxpr(step)(jnp.ones(packed.ids.shape, jnp.bfloat16))
    assert re.search(r"f32\[\d+\] = scatter-add", str(program))  # a sum of 300 ones in bfloat16 ends at 256, but XLA's does not


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
