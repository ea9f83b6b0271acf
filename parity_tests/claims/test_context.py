"""Cross-attention of a RingAttention: queries of one sharded sequence, keys and values of another."""

from __future__ import annotations

from itertools import product

import numpy as np

from ring_attn_core import full

from ..support.contexts import CONTEXT_LENGTH, arrays, check_cross_attention
from ..support.models import LAYER, LENGTH, layer_weights
from ..support.selection import first, in_each

IN_JAX = [(2, "zigzag", False, True), (2, "striped", True, True), (4, "zigzag", False, False), (1, "contiguous", False, False)]
RINGS = (1, "contiguous"), (2, "zigzag"), (4, "zigzag"), (4, "striped")
IN_TORCH = [(*ring, False, rotary) for ring, rotary in product(RINGS, (False, True))]


@in_each("ranks,layout,whole,rotary", jax=first(IN_JAX, most=3), torch=IN_TORCH, slow="jax")
def test_cross_attention_over_a_ring_is_exact(framework, ranks, layout, whole, rotary):
    x, context, key_mask, dout = arrays()
    arguments = {"mask": full(), "layout": layout, "rotary_base": 10000.0 if rotary else None}
    arguments |= {"context": context, "context_length": CONTEXT_LENGTH, "key_mask": key_mask}
    check_cross_attention(framework.layer(layer_weights(), x, dout, ranks, arguments, whole=whole), rotary)


def test_a_context_that_is_x_is_self_attention(framework):
    layer = framework.make("RingAttention", **LAYER, layout="contiguous", **framework.ring(1))
    where = framework.array(np.arange(LENGTH) * 3)
    x = framework.array(arrays()[0])
    alone, moved = (framework.compiled(lambda x, at=at: layer(x, *at))(x) for at in ((), (where,)))
    cross = lambda *at, **more: framework.compiled(lambda x: layer(x, *at, context=x, **more))(x)
    same, too, other = cross(), cross(where, context_positions=where), cross(where)
    assert (alone == same).all()
    assert (moved == too).all()
    assert (moved != other).any()


def test_a_context_of_no_length_is_all_that_its_shards_hold(framework):
    layer = framework.make("RingAttention", **LAYER, layout="contiguous", mask=full(), **framework.ring(1))
    x, context = map(framework.array, arrays()[:2])
    call = lambda x, **given: framework.numpy(framework.compiled(lambda x: layer(x, **given))(x))
    np.testing.assert_allclose(call(x, length=5, context=x)[:, :5], call(x[:, :5], context=x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(call(x, context=context), call(x, context=context, context_length=CONTEXT_LENGTH))
