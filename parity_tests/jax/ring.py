"""Runs a case of parity_tests/cases.py on the JAX ring."""

from __future__ import annotations

from functools import lru_cache
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from parity_tests.cases import Case
from ring_attn_core.oracle import Attention
from ring_attn_core.plan import RingPlan
from ring_attn_jax import blockwise, ring_attention

SEQ = PartitionSpec(None, "seq")


def mesh_of(ranks: int) -> Mesh:
    return jax.make_mesh((ranks,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


def options(plan: RingPlan) -> dict:
    return {"layout": plan.layout, "mask": plan.mask, "length": plan.length, "kv_length": plan.kv_length}


@lru_cache(maxsize=2048)
def run(case: Case) -> Attention:
    """out, lse, dq, dk, dv as whole arrays in natural order, padding included; compiled once for every case."""

    def attention(q, k, v):
        return ring_attention(q, k, v, **options(case.plan), scale=case.scale, return_lse=True)

    def program(q, k, v, dout, dlse):
        sharded = jax.shard_map(attention, mesh=mesh_of(case.ranks), in_specs=(SEQ, SEQ, SEQ), out_specs=(SEQ, SEQ))
        primal, vjp = jax.vjp(sharded, q, k, v)
        return *primal, *vjp((dout, dlse))

    q, k, v, dout, dlse = (np.concatenate(shards, 1) for shards in case.inputs())
    with jax.enable_x64(case.dtype == "float64"), patch_tiles(case):
        arrays = [jnp.asarray(x, case.dtype) for x in (q, k, v, dout)]
        results = jax.jit(program)(*arrays, jnp.asarray(dlse))
        wide = [np.asarray(x.astype(jnp.float64 if case.dtype == "float64" else jnp.float32)) for x in results]
    split = [np.split(x, case.ranks, 1) for x in wide]
    return Attention(*(case.gather(x, of) for x, of in zip(split, "qqqkk", strict=True)))


def patch_tiles(case: Case):
    small = case.tiles
    choose = (lambda rows, q, k: (min(small[0], q), min(small[1], k))) if small else blockwise.blockwise_tiles
    return patch.object(blockwise, "blockwise_tiles", choose)
