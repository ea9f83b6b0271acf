"""The states that earlier runs leave: affine maps of all runs, folded in order of position on each rank or on each rank's heads.

    state before the next run = a @ state + b        (a: a matrix, or a decay multiplied elementwise)

The backward is the same fold in reverse order with transposed maps. Ranks exchange all maps; or, if that is less, each gets the
maps of some heads and sends the states back. Both give the same bits. The size of a message does not depend on the length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_attn_core.plan.run_order import RunOrder, splits_heads

from ..axes import vary_alike
from .halo import of_rank, take
from .transfer import to_ranks

EXACT = lax.Precision.HIGHEST
"""The precision of float32 products on any GPU: a fold of 16 maps in tf32 is wrong by 8e-4."""


def fold_runs(a: jax.Array, b: jax.Array, order: RunOrder, axis_name: str, matrix: bool) -> jax.Array:
    """Return the state before each run, [batch, runs, heads, K, V], differentiable.

    ``b`` [batch, runs, heads, K, V]: what each run adds. ``a``: its transition [batch, runs, heads, K, K] if ``matrix``, else a
    decay whose last two dims broadcast to b's; 0 if a document begins in the run.
    """
    return _fold(*vary_alike((axis_name,), a, b), order, axis_name, matrix)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _fold(a: jax.Array, b: jax.Array, order: RunOrder, axis_name: str, matrix: bool) -> jax.Array:
    return _forward(a, b, order, axis_name, matrix)[0]


def _forward(a: jax.Array, b: jax.Array, order: RunOrder, axis_name: str, matrix: bool) -> Any:
    split = splits_heads(order.ranks, b.shape[2])
    maps = jnp.concatenate([x.reshape(*x.shape[:3], -1) for x in (a, b)], -1)
    maps = _by_event(_spread(take(maps, of_rank(order.sent, axis_name)), axis_name, split), order, order.slots)
    size = a.shape[3] * a.shape[4]
    ga, gb = (x.reshape(*x.shape[:3], *y.shape[3:]) for x, y in ((maps[..., :size], a), (maps[..., size:], b)))

    def step(state: jax.Array, maps: Any) -> Any:
        return apply_map(maps[0], state, matrix) + maps[1], state

    before = lax.scan(step, jnp.zeros_like(gb[0]), (ga, gb))[1]
    states = _collect(_by_run(before, order, b.shape[1]), axis_name, split, b.shape[2])
    return states, (ga, before, states, a[:0], b[:0])


def _backward(order: RunOrder, axis_name: str, matrix: bool, kept: Any, dstates: jax.Array) -> Any:
    ga, before, states, a, b = kept
    dstates, _ = lax.optimization_barrier((dstates, states))  # ranks whose transfers overtake each other wait for ever on a CPU
    split, runs = splits_heads(order.ranks, b.shape[2]), dstates.shape[1]
    spread = _spread(dstates.reshape(*dstates.shape[:3], -1), axis_name, split)
    reads = _by_event(spread, order, runs, every=True).reshape(before.shape)

    def step(dstate: jax.Array, event: Any) -> Any:
        a, read = event
        return apply_map(jnp.swapaxes(a, -1, -2) if matrix else a, dstate, matrix) + read, dstate

    db = lax.scan(step, jnp.zeros_like(before[0]), (ga, reads), reverse=True)[1]
    if matrix:
        da = jnp.matmul(db, jnp.swapaxes(before, -1, -2), precision=EXACT)
    else:
        da = (db * before).sum(tuple(d for d in (3, 4) if ga.shape[d] == 1), keepdims=True)
    maps = jnp.concatenate([x.reshape(*x.shape[:3], -1) for x in (da, db)], -1)
    maps = _collect(_by_run(maps, order, runs), axis_name, split, b.shape[2])
    size = a.shape[3] * a.shape[4]
    sent = (jnp.arange(runs)[:, None] == of_rank(order.sent, axis_name)).any(1).reshape(1, -1, 1, 1)
    maps = jnp.where(sent, maps, 0)
    return maps[..., :size].reshape(*maps.shape[:3], *a.shape[3:]), maps[..., size:].reshape(*maps.shape[:3], *b.shape[3:])


_fold.defvjp(_forward, _backward)


def apply_map(a: jax.Array, state: jax.Array, matrix: bool) -> jax.Array:
    """Return ``a @ state`` if ``matrix``, else ``a * state``."""
    return jnp.matmul(a, state, precision=EXACT) if matrix else a * state


def _by_event(x: jax.Array, order: RunOrder, slots: int, every: bool = False) -> jax.Array:
    """Sort [ranks, batch, slots, heads, ...] by position: [events, batch, heads, ...], 0 for a run that sends nothing.

    ``every``: the slots are all runs of a rank, not only those that send.
    """
    place = [
        r * slots + (i if every else order.senders[r].index(i)) if every or i in order.senders[r] else -1 for r, i in order.order
    ]
    flat = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
    flat = flat if slots else jnp.pad(flat, [(0, 1) if dim == 1 else (0, 0) for dim in range(flat.ndim)])
    return jnp.moveaxis(take(flat, jnp.asarray(place)), 1, 0)


def _by_run(x: jax.Array, order: RunOrder, runs: int) -> jax.Array:
    """Return [events, batch, heads, ...] as [ranks, batch, runs, heads, ...], 0 for runs without tokens."""
    place = np.full((order.ranks, runs), -1)
    for event, (rank, run) in enumerate(order.order):
        place[rank, run] = event
    return jnp.moveaxis(take(jnp.moveaxis(x, 0, 1), jnp.asarray(place)), 1, 0)


def _spread(x: jax.Array, axis_name: str, split: bool) -> jax.Array:
    """Give each rank [batch, n, heads, ...] of every rank, or if ``split`` of its own heads: [ranks, batch, n, heads, ...]."""
    if not split:
        return lax.all_gather(x, axis_name)
    ranks = lax.axis_size(axis_name)
    padded = jnp.pad(x, [(0, -x.shape[d] % ranks if d == 2 else 0) for d in range(x.ndim)])
    parts = padded.reshape(*x.shape[:2], ranks, -1, *x.shape[3:])
    return to_ranks(jnp.moveaxis(parts, 2, 0), axis_name)


def _collect(x: jax.Array, axis_name: str, split: bool, heads: int) -> jax.Array:
    """Return what each rank gets of [ranks, batch, n, heads, ...], the inverse of ``_spread``: [batch, n, heads, ...]."""
    if not split:
        return x[lax.axis_index(axis_name)]
    parts = jnp.moveaxis(to_ranks(x, axis_name), 0, 2)
    return parts.reshape(*parts.shape[:2], -1, *parts.shape[4:])[:, :, :heads]
