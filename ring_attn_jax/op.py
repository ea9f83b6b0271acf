"""The ring as a function with a derivative of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from .attend.backend import Backend
from .attend.keys import Keys, pack
from .axes import on_auto_axes, sharded_like
from .ring import loop
from .ring.step import Ring

OUT_NAME = "ring_attn_out"
LSE_NAME = "ring_attn_lse"


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q, k, v, key_mask, score, ring, backend):  # type: ignore[no-untyped-def]
    return _round_the_ring(q, k, v, key_mask, score, ring, backend)


def _round_the_ring(q, k, v, key_mask, score, ring, backend):  # type: ignore[no-untyped-def]
    def forward(q, k, v, key_mask, score):  # type: ignore[no-untyped-def]
        return loop.forward(q, _keys(k, v, key_mask, ring, backend), score, ring, backend)

    rows, of_v = sharded_like(q)[:3], sharded_like(v)
    return on_auto_axes(forward, (PartitionSpec(*rows, of_v[3]), PartitionSpec(*rows)))(q, k, v, key_mask, score)


def _keys(k: jax.Array, v: jax.Array, key_mask: jax.Array | None, ring: Ring, backend: Backend) -> Keys:
    return pack(k, v, key_mask, apart=backend.apart and not ring.plan.hops)


def _forward(q, k, v, key_mask, score, ring, backend):  # type: ignore[no-untyped-def]
    out, lse = _round_the_ring(q, k, v, key_mask, score, ring, backend)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, k, v, key_mask, score, out, lse)


def _backward(ring, backend, residuals, cotangents):  # type: ignore[no-untyped-def]
    dq, dk, dv, dsinks = _gradients(*residuals, *cotangents, ring, backend)  # type: ignore[misc]
    score = residuals[4]
    return dq, dk, dv, None, replace(score, extents=None, sinks=dsinks, slopes=None, draw=None)


@partial(jax.custom_vjp, nondiff_argnums=(9, 10))
def _gradients(q, k, v, key_mask, score, out, lse, dout, dlse, ring, backend):  # type: ignore[no-untyped-def]
    def backward(q, k, v, key_mask, score, out, lse, dout, dlse):  # type: ignore[no-untyped-def]
        keys = _keys(k, v, key_mask, ring, backend)
        dq, dkv, dsinks = loop.backward(q, keys, (out, lse), (dout, dlse), score, ring, backend)
        dk, dv = dkv if isinstance(dkv, tuple) else jnp.split(dkv, [k.shape[-1]], -1)
        dsinks = None if dsinks is None else dsinks.astype(score.sinks.dtype)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsinks

    specs = *map(sharded_like, (q, k, v)), None if score.sinks is None else sharded_like(score.sinks)
    return on_auto_axes(backward, specs)(q, k, v, key_mask, score, out, lse, dout, dlse)


def refuse_second_derivative(*_: Any) -> Any:
    raise RuntimeError("ring_attention has no second derivative: differentiate it once, without a grad of a grad")


_attention.defvjp(_forward, _backward)
_gradients.defvjp(lambda *arguments: (_gradients(*arguments), None), refuse_second_derivative)
