"""Large and nearly equal scores: the JAX ring is as exact as one rank, because the state has the rest of a rounded lse."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ring_attn_core import full
from ring_attn_jax import ring_attention
from ring_attn_jax.call.autograd import LSE_NAME, OUT_NAME

from ..support.cases import Case
from ..support.large_scores import large
from .ring import SEQ, mesh_of


def inputs(case: Case) -> list[jax.Array]:
    return [jnp.asarray(case.arrays[name]) for name in ("q", "k", "v", "dout")]


def test_a_policy_that_saves_out_and_lse_runs_no_second_ring():
    """It saves the rest of lse too, under the name of lse."""
    case = large(1e6, 2)
    attend = lambda q, k, v: ring_attention(q, k, v, layout="contiguous", mask=full(), scale=1.0)
    sharded = jax.shard_map(attend, mesh=mesh_of(2), in_specs=(SEQ, SEQ, SEQ), out_specs=SEQ)
    policy = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
    *qkv, dout = inputs(case)
    sends = lambda f: str(jax.make_jaxpr(lambda *x: jax.vjp(f, *x)[1](dout))(*qkv)).count("ppermute")
    assert sends(jax.checkpoint(sharded, policy=policy)) == sends(sharded)
