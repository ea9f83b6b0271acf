"""Prefill under ``order="global"``: a chunk's tiles are those of the training forward over the whole sequence, to the bit.

The queries of a rank stand at their positions in an array of the whole sequence, with zeros elsewhere: the rows of a tile do not
depend on each other. The keys of the cache and of the chunk, of all ranks, stand at their positions too. The mask hides what is
not there. The tiles of the sequence that hold a query of this rank are computed as on one rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.plan.global_order import TILE, GlobalPlan, OwnRuns
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import row

from ..attend.kernels import Kernels
from ..axes import vary_alike
from ..call.decide import compile_call
from ..call.prepare import Arrays, problem_of
from ..ring.strategies.global_order import own_tiles
from .cache import KVCache
from .step import DecodeStep

Pair = tuple[jax.Array, jax.Array]


def in_global_order(
    q: jax.Array, new: Pair, cache: KVCache, layer: int, step: DecodeStep, arrays: Arrays, options: Options
) -> tuple[jax.Array, Pair]:
    """Return the attention of this rank's queries, and ``new`` (k, v) to write. ``options.length``: of the whole sequence."""
    length: Any = options.length
    pick = lambda x: x if step.rows is None else x[step.into[:, 0]]
    (k, v), places = new, step.positions
    if not step.fresh:
        held = pick(cache.k[layer]), pick(cache.v[layer]), pick(cache.positions)
        held, k, v, places = vary_alike((cache.axis_name,), held, k, v, places)
        k, v, places = (jnp.concatenate(pair, 1) for pair in zip(held, (k, v, places), strict=True))
    gathered = lambda x: lax.all_gather(x, cache.axis_name, axis=1, tiled=True)
    whole = [_place(q, step.positions, length), *(_place(gathered(x), gathered(places), length) for x in (k, v))]
    whole, new = lax.optimization_barrier((whole, new))  # read the layer before it is written, in place
    out = _attend(whole, step.positions, arrays, options)
    out = jnp.take_along_axis(out, step.positions[..., None, None], 1, mode="clip")
    out = jnp.where((step.positions < length)[..., None, None], out, jnp.nan)
    return jnp.where((step.positions < 0)[..., None, None], 0, out).astype(q.dtype), new


def _place(x: jax.Array, positions: jax.Array, length: int) -> jax.Array:
    """Return x [b n h d] at its ``positions`` in an array [b length h d], 0 elsewhere. At -1 there is no token."""
    whole = jnp.zeros_like(x, shape=(len(x), length, *x.shape[2:]))
    places = jnp.where(positions < 0, length, positions)
    return whole.at[jnp.arange(len(x), dtype=jnp.int32)[:, None], places].set(x, mode="drop")


def _attend(whole: list[jax.Array], positions: jax.Array, arrays: Arrays, options: Options) -> jax.Array:
    """Return the attention of the whole sequence, true in the tiles of the queries at ``positions`` alone."""
    q, k, v = whole
    decision = compile_call(problem_of(q, k, v, arrays, 1, options), any_position=False)
    plan, backend = decision.steps, decision.backend
    assert isinstance(plan, GlobalPlan)
    own = (
        jnp.zeros_like(positions, bool, shape=(plan.q_slot,))
        .at[jnp.where(positions < 0, plan.q_slot, positions)]
        .set(True, mode="drop")
    )
    score = replace(decision.score_with(arrays), own_queries=own)
    if isinstance(backend, Kernels):  # one run of whole tiles, from the first to the last of these queries
        slot = -(-plan.length // TILE) * TILE
        first = jnp.min(jnp.where(positions < 0, slot, positions)) // TILE * TILE
        run = 0, jnp.clip((positions.max() // TILE + 1) * TILE, first, plan.length) - first, first, 1
        rows: Any = row(run, plan.k_runs[0][0], plan.band, slot, plan.k_slot)
        stacked: Any = [jnp.stack(jnp.broadcast_arrays(*x)).astype(jnp.int32)[None, None] for x in (run, rows)]
        runs = OwnRuns(slot, stacked[0], stacked[1][None])
        score = replace(score, query_tiles=own_tiles(runs, jnp.int32(0), plan.q_slot))
        backend = replace(backend, call=replace(backend.call, own=((1, slot), None)))
    keys, rows = decision.pack_keys(k, v, arrays), jnp.asarray(plan.rows(0, 0), jnp.int32)
    q, keys, rows, score = lax.optimization_barrier((q, keys, rows, score))
    return lax.optimization_barrier(backend.attend(q, keys, rows, score, None, last=True).out)
