"""Plays a story of parity_tests/support/stories.py with ring_attn_jax, on a ring of host devices."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ring_attn_jax import KVCache, prefill

from ..support.stories import Call, Prefill, Story
from .ring import QUICK, mesh_of

RANKS, SAME = PartitionSpec("seq"), PartitionSpec()
STATE = ("k", "v", "positions", "counts", "lengths", "k_scale", "v_scale")


def play(story: Story) -> list[list[dict[str, Any]]]:
    """[operations][ranks] of what a rank has after every operation, and the attention of prefill and the parts of a step in it.

    A program for every kind of step, with traced lengths and layers; what is done between steps runs on whole arrays.
    """
    cache = empty(story)
    played = []
    for operation, numbers in story.script():
        got: dict[str, Any] = {}
        if isinstance(operation, Call):
            called = lambda cache, call=operation: getattr(cache, call.name)(*call.arguments)
            cache = called(cache) if operation.name == "reserve" else compiled(called)(cache)
        elif isinstance(operation, Prefill):
            program = prefilling(story, operation.tokens, operation.rows, operation.fresh)
            shards = [story.shard(numbers, rank) for rank in range(story.ranks)]
            cache, out = program(cache, drawn(story, np.concatenate(shards, 1)), jnp.asarray(operation.lengths, jnp.int32))
            got["out"] = np.split(as_numpy(out), story.ranks, 2)
        else:
            program = appending(story, operation.tokens, operation.rows)
            valid = np.ones(numbers.shape, bool) if operation.valid is None else np.array(operation.valid)
            written, (advanced, positions, k, v, where) = program(cache, drawn(story, numbers), jnp.asarray(valid))
            cache = advanced if operation.kept else written
            parts = {"k": np.split(as_numpy(k), story.ranks, 2), "v": np.split(as_numpy(v), story.ranks, 2)}
            parts["p"] = np.split(np.asarray(where), story.ranks, 1)
            got["part"] = [{name: parts[name][rank] for name in "kvp"} for rank in range(story.ranks)]
            got["positions"] = [np.asarray(positions)] * story.ranks
        got["cache"] = snapshots(cache)
        played.append([{name: x[rank] for name, x in got.items()} for rank in range(story.ranks)])
    return played


@lru_cache(maxsize=64)
def prefilling(story: Story, tokens: int, rows: tuple[int, ...] | None, fresh: bool) -> Any:
    def on_rank(cache: KVCache, new: list[jax.Array], lengths: jax.Array) -> Any:
        step = cache.prefill_step(tokens, story.layout, lengths, rows=rows, fresh=fresh)

        def of_layer(cache: KVCache, given: Any) -> Any:
            layer, new = given
            out, cache = prefill(*new, cache=cache, layer=layer, step=step, **story.of_prefill)
            return cache, out

        cache, out = lax.scan(of_layer, cache, (jnp.arange(story.layers), new))
        return cache.advance(step), out

    keys = PartitionSpec(None, None, "seq")
    return program(story, on_rank, (keys, SAME), keys)


@lru_cache(maxsize=64)
def appending(story: Story, tokens: int, rows: tuple[int, ...] | None) -> Any:
    def on_rank(cache: KVCache, new: list[jax.Array], valid: jax.Array) -> Any:
        step = cache.step(tokens, valid=valid, rows=rows)

        def of_layer(cache: KVCache, given: Any) -> Any:
            layer, (_, k, v) = given
            cache = cache.append(layer, k, v, step)
            return cache, cache.part(layer, step)[:2]

        cache, (k, v) = lax.scan(of_layer, cache, (jnp.arange(story.layers), new))
        return cache, (cache.advance(step), step.positions, k, v, step.k_positions)

    keys = PartitionSpec(None, None, "seq")
    return program(story, on_rank, (SAME, SAME), (empty(story).specs, SAME, keys, keys, PartitionSpec(None, "seq")))


def program(story: Story, on_rank: Any, in_specs: tuple[Any, ...], out_specs: Any) -> Any:
    """``on_rank`` of a cache and more, compiled; returns a cache and more."""
    mesh = mesh_of(story.ranks)
    specs = empty(story).specs
    return compiled(jax.shard_map(on_rank, mesh=mesh, in_specs=(specs, *in_specs), out_specs=(specs, out_specs)))


def compiled(function: Any) -> Any:
    return jax.jit(function, compiler_options=QUICK if jax.default_backend() == "cpu" else None)


@lru_cache(maxsize=64)
def empty(story: Story) -> KVCache:
    return KVCache.make(story.sizes, story.batch, story.capacity, **story.options, mesh=mesh_of(story.ranks))


def drawn(story: Story, numbers: np.ndarray) -> list[jax.Array]:
    """q, k, v [layers, requests, tokens, ...] of the tokens with these numbers."""
    return [jnp.asarray(np.moveaxis(story.tokens[name][numbers], 2, 0), story.compute_dtype) for name in "qkv"]


def snapshots(cache: KVCache) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each rank."""
    whole = {name: as_numpy(getattr(cache, name)) for name in STATE}
    ranks = cache.spec.ranks
    dims = {"k": 2, "v": 2, "positions": 1}
    apart = {name: np.split(x, ranks, dims[name]) if name in dims else [x] * ranks for name, x in whole.items()}
    return [{name: x[rank] for name, x in apart.items()} for rank in range(ranks)]


def as_numpy(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x)
