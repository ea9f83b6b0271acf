"""The exchange of the tokens before each run, and of their gradients: one all-gather each, of equal size on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.plan.run_order import RunOrder

from ..axes import vary_alike


def all_gather(x: jax.Array, axis_name: str) -> jax.Array:
    """Concatenate the arrays [batch, n, ...] of all ranks along dim 1."""
    return lax.all_gather(x, axis_name, axis=1, tiled=True)


def exchange_halo(x: jax.Array, order: RunOrder, width: int, axis_name: str) -> jax.Array:
    """Return the ``width`` tokens before each run of this rank, [batch, runs, width, ...], 0 before the sequence; differentiable.

    ``x``: this rank's shard [batch, tokens, ...]. A token's gradient adds, in at least float32, those of all halos that hold it,
    in the order of the ranks and runs that read it.
    """
    return _halo(*vary_alike((axis_name,), x), order, width, axis_name)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return the entries of dim 1 at ``index`` [n, ...], 0 where the index is -1: [batch, n, ..., *x.shape[2:]]."""
    found = jnp.take(x, jnp.maximum(index, 0), axis=1)
    return jnp.where((index >= 0).reshape(1, *index.shape, *[1] * (x.ndim - 2)), found, 0)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def of_rank(table: Any, axis_name: str) -> jax.Array:
    """Return this rank's row of a table."""
    return jnp.asarray(table)[lax.axis_index(axis_name)]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _halo(x: jax.Array, order: RunOrder, width: int, axis_name: str) -> jax.Array:
    table = order.halo(width)
    found = take(all_gather(take(x, of_rank(table.tails, axis_name)), axis_name), of_rank(table.sources, axis_name))
    return found.reshape(x.shape[0], -1, width, *x.shape[2:])


def _forward(x: jax.Array, order: RunOrder, width: int, axis_name: str) -> Any:
    return _halo(x, order, width, axis_name), x[:0]


def _backward(order: RunOrder, width: int, axis_name: str, empty: jax.Array, dhalo: jax.Array) -> Any:
    table, shape = order.halo(width), (dhalo.shape[0], *empty.shape[1:])
    tails, readers = of_rank(table.tails, axis_name), of_rank(table.readers, axis_name)
    dread = all_gather(wide(dhalo).reshape(shape[0], -1, *shape[2:]), axis_name)
    dtails = sum((take(dread, each) for each in readers), jnp.zeros((), dread.dtype))
    dx = jnp.zeros((shape[0], shape[1] + 1, *shape[2:]), dread.dtype)  # the last place takes what is no token's
    dx = dx.at[:, jnp.where(tails < 0, shape[1], tails)].set(dtails)
    dx, _ = vary_alike((), dx, dhalo)  # a ring of one rank has no readers, so dx is zeros
    return (dx[:, :-1].astype(dhalo.dtype),)


_halo.defvjp(_forward, _backward)
