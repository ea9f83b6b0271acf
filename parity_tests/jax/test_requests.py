"""Requests of a cache in JAX: what a copy of one knows of its tokens, and that a step writes no slot twice."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from ring_attn_core.cache.spec import CacheSpec
from ring_attn_jax import CacheSizes, KVCache
from ring_attn_jax.inference.step import CachedRequests, prefilled

from .ring import mesh_of

SIZES = CacheSizes(1, 2, 8)


def test_a_copy_of_a_request_knows_which_rank_holds_its_tokens():
    cache = KVCache.make(SIZES, 2, 8, dtype="float32", mesh=mesh_of(2))
    held = {"counts": [[2, 2], [1, 0]], "lengths": [4, 1], "reached": [4, 1]}
    held["positions"] = [[0, 1, -1, -1, 2, 3, -1, -1], [0, *[-1] * 7]]
    cache = replace(cache, owners=cache.owners.at[0, 2:4].set(1), **{n: jnp.asarray(x, jnp.int32) for n, x in held.items()})
    cache = cache.fork(0, 1).rollback([4, 1])
    assert cache.counts.tolist() == [[2, 2], [1, 0]]
    assert cache.positions.tolist() == held["positions"]


def test_a_step_writes_no_slot_twice():
    """Of a chunk of more tokens than there are slots the last ones stay."""
    spec = CacheSpec.of(SIZES, 1, None, 1, dtype="float32", window=3, room=3)
    nothing = jnp.zeros((1, 1), jnp.int32)
    held = CachedRequests(jnp.full((1, spec.slots), -1, jnp.int32), nothing, nothing[0], spec, jnp.int32(0))
    step = prefilled(held, jnp.asarray([10], jnp.int32), "contiguous", 10)
    assert sorted(step["slots"][0].tolist()) == list(range(6))
    assert sorted(step["k_positions"][0].tolist()) == list(range(4, 10))
