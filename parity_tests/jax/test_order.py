"""``order="global"`` of JAX: compiled as users compile, on whole arrays, and refused in a traced layout."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core import causal
from ring_attn_jax import TracedLayout, attention_fn, sharded_ring_attention

from ..support.orders import BALANCED, ORDERED, RINGS, check_bits
from .ring import mesh_of, run


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["documents in a window", "tiles of users"])
def test_programs_compiled_as_users_compile_them_have_the_same_bits(name):
    check_bits(ORDERED[name], partial(run.__wrapped__, quick=False), RINGS)


@pytest.mark.exhaustive
def test_sharded_attention_has_the_bits_of_one_device():
    q, k = (jax.random.normal(jax.random.key(i), (2, 16, heads, 8)) for i, heads in enumerate((4, 2)))
    results = [
        sharded_ring_attention(q, k, k, mesh=mesh_of(ranks), layout="contiguous", order="global", return_lse=True)
        for ranks in (1, 2, 4)
    ]
    for pair in results[1:]:
        for got, expected in zip(pair, results[0], strict=True):
            np.testing.assert_array_equal(got, expected)


def test_attention_in_flax_has_the_bits_of_one_device():
    q, k = (jax.random.normal(jax.random.key(i), (2, 23, 4, 8)) for i in range(2))
    one, three = (attention_fn(mesh=mesh_of(ranks), mask=causal(), order="global")(q, k, k) for ranks in (1, 3))
    np.testing.assert_array_equal(one, three)


def test_a_traced_layout_is_refused():
    q, layout = jnp.zeros((1, 61, 2, 4)), TracedLayout.of(BALANCED.layout)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r'order="global" does not run a TracedLayout: pass the shard\.layout'):
        sharded_ring_attention(q, q, q, mesh=mesh_of(1), layout=layout, order="global")
