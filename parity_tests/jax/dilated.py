"""Runs a case of parity_tests/support/dilated.py on the JAX ring."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_attn_core.reference.oracle import Attention
from ring_attn_jax import dilated_attention

from ..support.dilated import Case
from .ring import QUICK, SEQ, mesh_of


def run(case: Case) -> Attention:
    """out, lse, dq, dk, dv as whole arrays, padding included."""
    inputs = case.inputs()
    key_mask = inputs.pop("key_mask", None)
    mesh, optional = mesh_of(case.ranks), {} if key_mask is None else {"key_mask": jnp.asarray(key_mask)}

    def attention(q: Any, k: Any, v: Any, optional: dict[str, Any]) -> Any:
        return dilated_attention(q, k, v, **optional, **case.arguments, return_lse=True)

    def results(q: Any, k: Any, v: Any, dout: Any, dlse: Any, optional: dict[str, Any]) -> Any:
        sharded = jax.shard_map(attention, mesh=mesh, in_specs=(SEQ, SEQ, SEQ, SEQ), out_specs=(SEQ, SEQ))
        primal, vjp = jax.vjp(lambda q, k, v: sharded(q, k, v, optional), q, k, v)
        return *primal, *vjp((dout, dlse))

    with jax.enable_x64(case.dtype == "float64"):
        *arrays, dlse = (jnp.asarray(x, case.dtype if name != "dlse" else x.dtype) for name, x in inputs.items())
        got = jax.jit(results, compiler_options=QUICK if jax.default_backend() == "cpu" else None)(*arrays, dlse, optional)
        return Attention(*(np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32))) for x in got))
