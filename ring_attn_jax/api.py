"""The public call: checks, the plan, and a custom_vjp round the ring."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from ring_attn_core.kernels.backends import select
from ring_attn_core.kernels.problem import Problem, refuse_later
from ring_attn_core.masks import causal
from ring_attn_core.plan import RingPlan
from ring_attn_core.runs import Band

from . import ring
from .attend import Score, pack
from .varying import dtype_names, ring_size, vary_alike

OUT_NAME = "ring_attn_out"
LSE_NAME = "ring_attn_lse"


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str = "seq",
    layout: str = "zigzag",
    mask: Band = causal(),
    extents: Any = None,
    key_mask: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    dropout_offset: tuple[Any, Any] = (0, 0),
    length: int | None = None,
    kv_length: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    refuse_later(
        strategy,
        extents=extents,
        key_mask=key_mask,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed,
        dropout_offset=dropout_offset,
    )
    problem = Problem(
        tuple(q.shape), tuple(k.shape), tuple(v.shape), dtype_names(q, k, v), jax.default_backend(),
        ring_size(axis_name), layout, mask, length, kv_length, scale, backend,
    )  # fmt: skip
    plan = problem.check()
    score = Score(q.shape[-1] ** -0.5 if scale is None else float(scale), select(problem, backend))
    out, lse = _attention(*vary_alike(axis_name, q, k, v), plan, axis_name, score)
    return (out, lse) if return_lse else out


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, plan: RingPlan, axis: str, score: Score) -> tuple[jax.Array, jax.Array]:
    return ring.forward(q, pack(k, v), plan, axis, score)


def _forward(q, k, v, plan, axis, score):  # type: ignore[no-untyped-def]
    out, lse = ring.forward(q, pack(k, v), plan, axis, score)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, k, v, out, lse)


def _backward(plan, axis, score, residuals, cotangents):  # type: ignore[no-untyped-def]
    q, k, v, out, lse = residuals
    dq, dkv = ring.backward(q, pack(k, v), out, lse, *cotangents, plan, axis, score)
    dk, dv = jnp.split(dkv, [k.shape[-1]], -1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


_attention.defvjp(_forward, _backward)
