"""Plays a story of parity_tests/support/caches.py with ring_attn_jax, on a ring of host devices."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ring_attn_jax import KVCache, prefill

from ..support.caches import Append, Call, Prefill, Story
from .ring import QUICK, mesh_of

RANKS = PartitionSpec("seq")
STATE = ("k", "v", "positions", "counts", "lengths", "k_scale", "v_scale")


@lru_cache(maxsize=64)
def play(story: Story) -> list[list[dict[str, Any]]]:
    """[operations][ranks] of what a rank has after every operation, and the attention of prefill and the parts of a step in it.

    One program for the whole story, each array with the ranks in front.
    """
    mesh = mesh_of(story.ranks)
    cache = KVCache.make(story.sizes, story.batch, story.capacity, **story.options, mesh=mesh)
    script = story.script()
    given = [[tokens(story, operation, numbers) for operation, numbers in script]]

    def on_rank(cache: KVCache, given: list[Any]) -> Any:
        played = []
        for (operation, _), new in zip(script, given[0], strict=True):
            got: dict[str, Any] = {}
            if isinstance(operation, Call):
                cache = getattr(cache, operation.name)(*operation.arguments)
            elif isinstance(operation, Prefill):
                arguments = (operation.tokens, story.layout, operation.lengths)
                step = cache.prefill_step(*arguments, rows=operation.rows, fresh=operation.fresh)
                outs = []
                for layer in range(story.layers):
                    out, cache = prefill(*(x[0, layer] for x in new), cache, layer, step, **story.features)
                    outs.append(out)
                got["out"] = jnp.stack(outs)
                cache = cache.advance(step)
            else:
                valid = None if operation.valid is None else jnp.asarray(operation.valid)
                step = cache.step(operation.tokens, valid=valid, rows=operation.rows)
                written, parts = cache, []
                for layer in range(story.layers):
                    written = written.append(layer, *(x[layer] for x in new[1:]), step)
                    parts.append(written.part(layer, step))
                k, v = (jnp.stack([getattr(part, name) for part in parts]) for name in "kv")
                got |= {"positions": step.positions, "part": {"k": k, "v": v, "p": parts[0].k_positions}}
                cache = written.advance(step) if operation.kept else written
            got["cache"] = {name: getattr(cache, name) for name in STATE}
            played.append(got)
        wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return cache, jax.tree.map(lambda x: wide(x)[None], played)

    sharded = [RANKS if isinstance(operation, Prefill) else PartitionSpec() for operation, _ in script]
    ring = jax.shard_map(on_rank, mesh=mesh, in_specs=(cache.specs, [sharded]), out_specs=(cache.specs, RANKS))
    compiled = jax.jit(ring, compiler_options=QUICK if jax.default_backend() == "cpu" else None)
    _, played = compiled(cache, given)
    return [[jax.tree.map(lambda x, rank=rank: np.asarray(x[rank]), got) for rank in range(story.ranks)] for got in played]


def tokens(story: Story, operation: Prefill | Append | Call, numbers: np.ndarray) -> list[jax.Array]:
    """q, k, v [ranks, layers, requests, tokens, ...] of a chunk's shards, [layers, requests, tokens, ...] of other new tokens."""
    if isinstance(operation, Call):
        return []
    if isinstance(operation, Prefill):
        numbers = np.stack([story.shard(numbers, rank) for rank in range(story.ranks)])
    drawn = [np.moveaxis(story.tokens[name][numbers], numbers.ndim, numbers.ndim - 2) for name in "qkv"]
    return [jnp.asarray(x, story.compute_dtype) for x in drawn]
