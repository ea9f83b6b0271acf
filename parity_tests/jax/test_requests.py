"""Requests of a cache in JAX: what a copy of one knows of its tokens, and the slots that a step writes."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ring_attn_core.cache.spec import CacheSpec
from ring_attn_jax import CacheSizes, KVCache
from ring_attn_jax.inference.step import CachedRequests, append_chunk

from .ring import mesh_of

SIZES = CacheSizes(1, 2, 8)


def test_a_copy_of_a_request_knows_which_rank_holds_its_tokens():
    cache = KVCache.make(SIZES, 2, 8, dtype="float32", mesh=mesh_of(2))
    held = {"counts": [[2, 2], [1, 0]], "lengths": [4, 1], "reached": [4, 1]}
    held["positions"] = [[0, 1, -1, -1, 2, 3, -1, -1], [0, *[-1] * 7]]
    cache = replace(cache, owners=cache.owners.at[0, 2:4].set(1), **{n: jnp.asarray(x, jnp.int32) for n, x in held.items()})
    cache = jax.jit(lambda cache: cache.fork(0, 1).rollback([4, 1]))(cache)
    assert cache.counts.tolist() == [[2, 2], [1, 0]]
    assert cache.positions.tolist() == held["positions"]


def test_the_last_tokens_of_a_chunk_longer_than_the_slots_stay_one_in_each_slot():
    spec = CacheSpec.of(SIZES, 1, None, 1, dtype="float32", window=3, room=3)
    nothing = jnp.zeros((1, 1), jnp.int32)
    held = CachedRequests(jnp.full((1, spec.slots), -1, jnp.int32), nothing, nothing[0], spec, jnp.int32(0))
    step = jax.jit(lambda new: append_chunk(held, new, "contiguous", 10))(jnp.asarray([10], jnp.int32))
    assert sorted(step["slots"][0].tolist()) == list(range(6))
    assert sorted(step["k_positions"][0].tolist()) == list(range(4, 10))


def appended(cache: KVCache, tokens: int) -> KVCache:
    """The cache with ``tokens`` more tokens of each request under jit; k and v are their positions."""

    def on_ring(cache: KVCache) -> KVCache:
        step = cache.step(tokens)
        new = jnp.broadcast_to(step.positions[..., None, None].astype(jnp.float32), (2, tokens, 2, 8))
        return cache.append(0, new, new, step).advance(step)

    return jax.jit(jax.shard_map(on_ring, mesh=mesh_of(2), in_specs=(cache.specs,), out_specs=cache.specs))(cache)


def test_a_token_beyond_the_capacity_is_lost_and_overwrites_none():
    cache = KVCache.make(SIZES, 2, 8, dtype="float32", mesh=mesh_of(2))
    full = appended(appended(cache, 6), 4)
    assert full.positions.tolist() == [[0, 2, 4, 6, 1, 3, 5, 7]] * 2
    assert full.k[0, :, :, 0, 0].tolist() == [[0, 2, 4, 6, 1, 3, 5, 7]] * 2
    assert (full.counts.tolist(), full.lengths.tolist()) == ([[4, 4]] * 2, [8, 8])
    with pytest.raises(ValueError, match="the cache is full: request 0 has 8 tokens, and 1 more exceed the capacity of 8"):
        full.check_room()
    back = appended(full.rollback([1, 7]), 1)
    assert back.positions.tolist() == [[0, -1, -1, -1, 1, -1, -1, -1], [0, 2, 4, 6, 1, 3, 5, 7]]


def test_a_chunk_on_a_full_rank_is_lost_there_and_overwrites_none():
    spec = CacheSpec.of(SIZES, 1, 8, 2, dtype="float32")
    counts, positions = jnp.asarray([[3, 1]], jnp.int32), jnp.asarray([[0, 1, 2, -1]], jnp.int32)
    held = CachedRequests(positions, counts, jnp.asarray([4], jnp.int32), spec, jnp.int32(0))
    step = jax.jit(lambda new: append_chunk(held, new, "contiguous", 2))(jnp.asarray([3], jnp.int32))
    assert step["k_positions"].tolist() == [[0, 1, 2, 4]]
    assert (step["counts"].tolist(), step["lengths"].tolist()) == ([[5, 2]], [7])
