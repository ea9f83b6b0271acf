"""Runs a case of parity_tests/support/dilated.py on the JAX ring."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_attn_core.reference.oracle import Attention
from ring_attn_jax import dilated_attention

from ..support.dilated import Case
from .ring import QUICK, SEQ, mesh_of


@lru_cache(maxsize=256)
def run(case: Case) -> Attention:
    """out, lse, dq, dk, dv as whole arrays, padding included."""
    return run_anew(case)


def run_anew(case: Case) -> Attention:
    """``run`` of a case whose arrays were changed."""
    inputs = case.inputs()
    key_mask = inputs.pop("key_mask", None)
    optional = {} if key_mask is None else {"key_mask": jnp.asarray(key_mask)}
    with jax.enable_x64(case.dtype == "float64"):
        *arrays, dlse = (jnp.asarray(x, case.dtype if name != "dlse" else x.dtype) for name, x in inputs.items())
        got = program(case)(*arrays, dlse, optional)
        return Attention(*(np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32))) for x in got))


@lru_cache(maxsize=256)
def program(case: Case) -> Callable[..., Any]:
    """Of arrays: out, lse, dq, dk, dv; compiled once for every case."""

    def attention(q: Any, k: Any, v: Any, optional: dict[str, Any]) -> Any:
        return dilated_attention(q, k, v, **optional, **case.arguments, return_lse=True)

    def results(q: Any, k: Any, v: Any, dout: Any, dlse: Any, optional: dict[str, Any]) -> Any:
        sharded = jax.shard_map(attention, mesh=mesh_of(case.ranks), in_specs=(SEQ, SEQ, SEQ, SEQ), out_specs=(SEQ, SEQ))
        primal, vjp = jax.vjp(lambda q, k, v: sharded(q, k, v, optional), q, k, v)
        return *primal, *vjp((dout, dlse))

    return jax.jit(results, compiler_options=QUICK if jax.default_backend() == "cpu" else None)
