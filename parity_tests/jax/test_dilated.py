"""Dilated attention in JAX: over every mesh axis, and what it sends."""

# pyright: reportArgumentType=false

from __future__ import annotations

import jax
import numpy as np
import pytest

from ring_attn_core import full
from ring_attn_jax import dilated_attention, sharded_dilated_attention

from .ring import SEQ, mesh_of


def arrays(heads=4, kv_heads=4, tokens=16):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, tokens, h, 8)) for key, h in zip(keys, (heads, kv_heads, kv_heads), strict=True)]


@pytest.mark.exhaustive
def test_whole_arrays_over_every_mesh_axis_give_the_same():
    q, k, v = arrays(kv_heads=2)
    key_mask = jax.random.bernoulli(jax.random.key(1), 0.8, (2, 16))
    asked = {"segments": (6,), "dilations": (2,), "key_mask": key_mask, "return_lse": True}
    alone = sharded_dilated_attention(q, k, v, mesh=mesh_of(1), **asked)
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "model"))
    spread = sharded_dilated_attention(q, k, v, mesh=mesh, batch_axes="data", head_axis="model", **asked)
    for a, b in zip(alone, spread, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("wrong", [{"dilations": (1, 4)}, {"mixing": "heads"}])
def test_heads_that_would_keep_other_tokens_on_another_member_are_refused(wrong):
    mesh = jax.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="every member holds 2 heads"):
        sharded_dilated_attention(*arrays(), mesh=mesh, head_axis="model", **{"segments": (4, 8), "dilations": (1, 2), **wrong})


def test_keys_travel_only_between_ranks_that_share_a_segment():
    def program(segments: tuple[int, ...]) -> str:
        call = lambda q, k, v: dilated_attention(q, k, v, segments=segments, dilations=(1,), mask=full())
        return str(jax.make_jaxpr(jax.shard_map(call, mesh=mesh_of(4), in_specs=(SEQ,) * 3, out_specs=SEQ))(*arrays()))

    assert [program(segments).count("ppermute[") for segments in ((4,), (8,), (16,))] == [0, 2, 3]
