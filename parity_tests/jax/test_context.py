"""Cross-attention of a RingAttention in JAX: queries of one sharded sequence, keys and values of another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_core import full
from ring_attn_jax import RingAttention, from_numpy, to_layout, to_numpy

from ..support.contexts import CONTEXT_LENGTH, arrays, check_cross_attention
from ..support.models import LAYER, LENGTH, layer_weights
from ..support.selection import first
from .models import REPLICATED
from .ring import SEQ, mesh_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "whole", "rotary"),
    first(
        [(2, "zigzag", False, True), (2, "striped", True, True), (4, "zigzag", False, False), (1, "contiguous", False, False)],
        most=3,
    ),
)
def test_cross_attention_over_a_ring_is_exact(ranks, layout, whole, rotary):
    mesh = mesh_of(ranks)
    made = {"mask": full(), "layout": layout, "rotary_base": 10000.0 if rotary else None, "mesh": mesh if whole else None}
    layer = from_numpy(RingAttention(**LAYER | made, rngs=nnx.Rngs(0)), layer_weights())
    graph, state = nnx.split(layer, nnx.Param)
    there = lambda x, pad=0: to_layout(jnp.asarray(x), layout, ranks, pad_value=pad)

    def forward(state, x, context, key_mask):
        called = {"context": context, "context_length": CONTEXT_LENGTH, "key_mask": key_mask}
        return nnx.merge(graph, state)(x, length=LENGTH, **called)

    @jax.jit
    def program(state, x, context, key_mask, dout):
        sharded = forward
        if not whole:
            sharded = jax.shard_map(forward, mesh=mesh, in_specs=(REPLICATED, SEQ, SEQ, SEQ), out_specs=SEQ)
        out, vjp = jax.vjp(lambda state, x, context: sharded(state, x, context, key_mask), state, x, context)
        return out, *vjp(dout)

    x, context, key_mask, dout = arrays()
    out, gradients, dx, dcontext = program(state, there(x), there(context), there(key_mask, False), there(dout))
    nnx.update(layer, gradients)
    got = {"out": out, "dx": dx, "dcontext": dcontext}
    check_cross_attention({name: np.asarray(y) for name, y in got.items()} | to_numpy(layer), layout, ranks, rotary)


def test_a_context_that_is_x_is_self_attention():
    layer = RingAttention(**LAYER, layout="contiguous", mesh=mesh_of(1), rngs=nnx.Rngs(0))
    positions = jnp.arange(LENGTH) * 3

    @jax.jit
    def program(x):
        return layer(x, positions), layer(x, positions, context=x, context_positions=positions), layer(x, positions, context=x)

    alone, same, other = program(jnp.asarray(arrays()[0]))
    np.testing.assert_array_equal(alone, same)
    assert (alone != other).any()
