"""Tests of summary attention in JAX: every shard_map and mesh, its layer, and the refusal of other objects than arrays."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ring_attn_jax import sharded_summary_attention, summary_attention

from ..support.summaries import MEAN, SummaryCase, refused
from .ring import QUICK, SEQ, mesh_of

REPLICATED = PartitionSpec()
QUICKLY = QUICK if jax.default_backend() == "cpu" else None


@pytest.mark.exhaustive
def test_inside_a_shard_map_that_checks_nothing_the_pools_gradient_is_a_ranks_part():
    case = SummaryCase()
    arrays = {name: jnp.asarray(x) for name, x in case.padded().items()}

    def gradient(q, k, v, pool, dout, dlse):
        total, vjp = jax.vjp(lambda pool: summary_attention(q, k, v, pool, **case.options, return_lse=True), pool)
        (dpool,) = vjp((dout, dlse))
        return jax.lax.psum(dpool, "seq")

    specs = SEQ, SEQ, SEQ, REPLICATED, SEQ, SEQ
    sharded = jax.shard_map(gradient, mesh=mesh_of(4), in_specs=specs, out_specs=REPLICATED, check_vma=False)
    got = jax.jit(sharded, compiler_options=QUICKLY)(*(arrays[name] for name in ("q", "k", "v", "pool", "dout", "dlse")))
    expected = case.expected.dpool
    assert expected is not None
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) <= case.allowed("dpool")


@pytest.mark.exhaustive
def test_batch_and_heads_may_be_sharded_too():
    case = SummaryCase(2, block=5)
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    attend = partial(sharded_summary_attention, mesh=mesh, batch_axes="data", head_axis="tensor", **case.options)
    arrays = [jnp.asarray(case.padded()[name]) for name in ("q", "k", "v", "pool")]
    out = jax.jit(attend, compiler_options=QUICKLY)(*arrays)
    np.testing.assert_allclose(out[:, : case.length], case.expected.out, rtol=0, atol=2e-6)


def test_arguments_that_are_not_arrays_and_a_call_outside_a_shard_map_are_refused():
    arrays, options = refused({})
    for name, what in (("q", "q, k and v"), ("pool", "pool")):
        with pytest.raises(ValueError, match=f"{what} must be .*array.*, got list"):
            sharded_summary_attention(**arrays | {name: [1.0]}, **options, mesh=mesh_of(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="axis_name='seq' is not a mesh axis here"):
        summary_attention(**arrays, **options)  # type: ignore[arg-type]


def test_no_rows_give_no_rows():
    q = jnp.ones((0, 8, 2, 4))
    assert sharded_summary_attention(q, q, q, mesh=mesh_of(1), pooling=MEAN, block=2, window=1).shape == q.shape
