"""Dropout in JAX: the same set where batch and heads are sharded, for any seed, which compiles nothing anew."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ring_attn_core import full
from ring_attn_jax import sharded_ring_attention

from ..support.cases import Case, check_kept, one_hot
from ..support.selection import first
from .ring import mesh_of, options, whole


@pytest.mark.exhaustive
def test_dropout_keeps_the_same_set_where_batch_and_heads_are_sharded():
    case = one_hot(Case("zigzag", full(), 2, v_dim=37, dropout_rate=0.3))
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(AxisType.Auto,) * 3)
    check_kept(case, natural(case, dropped(case, mesh, case.seed, batch_axes="data", head_axis="tensor")))


@pytest.mark.parametrize("seed", first([2**40 + 3, -(2**63), 0, -1], 2))
def test_a_seed_may_be_any_int64(seed):
    case = one_hot(Case("striped", full(), 2, v_dim=37, dropout_rate=0.3, seed=seed))
    check_kept(case, natural(case, dropped(case, mesh_of(2), seed)))


def test_a_new_seed_each_step_compiles_nothing():
    case = one_hot(Case("striped", full(), 2, v_dim=37, dropout_rate=0.3))
    step = jax.jit(partial(dropped, case, mesh_of(2)))
    seeds = {seed: jnp.int32(seed) for seed in (0, 7, -1)}
    step(seeds[0])
    with jax.no_tracing():
        results = {seed: step(array) for seed, array in seeds.items()}
    for seed, out in results.items():
        check_kept(replace(case, seed=seed), natural(case, out))


def dropped(case, mesh, seed, **axes):
    """Only out, in layout order."""
    q, k, v = (jnp.asarray(x) for x in whole(case)[:3])
    dropout = {"dropout_rate": case.dropout_rate, "dropout_seed": seed}
    return sharded_ring_attention(q, k, v, mesh=mesh, **options(case.plan), **dropout, **axes)


def natural(case, out):
    return case.gather(np.split(np.asarray(out), case.ranks, 1))
