"""Blocks merged are the whole: attend_block and merge against float64, on runs of every stride, gradients through both."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core import Run, causal, full, sliding_window
from ring_attn_jax import attend_block

from .ring import mesh_of


def compiled(**options):
    """Return ``attend_block`` as one program, where JAX would compile each operation."""
    return jax.jit(partial(attend_block, **options))


def test_a_traced_run_compiles_nothing_anew():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    block = jax.jit(lambda start, length: attend_block(q, k, v, q_run=Run(start, length)))
    block(3, 8)
    with jax.no_tracing():
        moved = block(5, 6)
    for mine, plain in zip(moved, compiled(q_run=Run(5, 6))(q, k, v), strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-6)


@pytest.mark.parametrize("offset", [2**31, 2**40, -(2**40)])
def test_a_mask_beyond_every_lag_goes_with_a_traced_run(offset):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    block = lambda start, mask: attend_block(q, k, v, mask=mask, q_run=Run(start, 8))
    wide, plain = jax.jit(block, static_argnums=1)(3, causal(offset)), block(3, full())
    if offset < 0:  # every key is too new
        plain = jnp.zeros_like(plain[0]), jnp.full_like(plain[1], -jnp.inf)
    for mine, other in zip(wide, plain, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_gradients_of_what_every_rank_holds_alike_are_summed_over_blocks_elsewhere():
    """q, k, v are replicated, and only the place of the block is the rank's own."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    at = lambda start: lambda q, k, v: attend_block(q, k, v, mask=sliding_window(5), q_run=Run(start, 8))[0]
    own = lambda q, k, v: at(jax.lax.axis_index("seq") * 3)(q, k, v)[None]
    whole = jax.sharding.PartitionSpec()
    placed = jax.shard_map(own, mesh=mesh_of(2), in_specs=whole, out_specs=jax.sharding.PartitionSpec("seq"))
    both = lambda q, k, v: jnp.stack([at(0)(q, k, v), at(3)(q, k, v)])
    np.testing.assert_allclose(jax.jit(placed)(q, k, v), jax.jit(both)(q, k, v), atol=1e-6)
    gradients = (jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), (0, 1, 2)))(q, k, v) for f in (placed, both))
    for mine, plain in zip(*gradients, strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)


def test_a_block_inside_shard_map_takes_its_place_from_the_rank():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    own = lambda q, k, v: attend_block(q, k, v, q_run=Run(jax.lax.axis_index("seq") * 4, 4))[0]
    spec = jax.sharding.PartitionSpec(None, "seq")
    whole = jax.sharding.PartitionSpec()
    placed = jax.shard_map(own, mesh=mesh_of(2), in_specs=(spec, whole, whole), out_specs=spec)
    np.testing.assert_allclose(jax.jit(placed)(q, k, v), compiled()(q, k, v)[0], atol=1e-6)
    total = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(f(*x) ** 2), (0, 1, 2)))
    gradients = (total(f)(q, k, v) for f in (placed, lambda *x: attend_block(*x)[0]))
    for mine, plain in zip(*gradients, strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)
