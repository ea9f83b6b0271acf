"""Attention of given shards: the state that is carried from step to step, and the backend that moves it on."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import blockwise
from .blockwise import State, accumulation_dtype

BACKENDS = {"blockwise": blockwise}


class Score(NamedTuple):
    """What makes a score of q . k, and who computes it."""

    scale: float
    backend: str


def pack(k: jax.Array, v: jax.Array) -> jax.Array:
    """k [b t g d], v [b t g e] -> kv [b t g d+e], the one array that travels."""
    return jnp.concatenate([k, v], -1)


def nothing(q: jax.Array, kv: jax.Array) -> State:
    """The (out, lse) of no keys at all: out 0 and lse -inf, in the accumulation dtype."""
    b, s, h, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    out = jnp.zeros_like(q, shape=(b, s, h, kv.shape[-1] - d), dtype=dtype)
    return out, jnp.full_like(q, -jnp.inf, shape=(b, s, h), dtype=dtype)


def attend(q: jax.Array, kv: jax.Array, rows: jax.Array, score: Score, total: State, last: bool) -> State:
    """``total`` with the visible keys of ``kv`` merged in; the last step casts out to q's dtype."""
    out, lse = BACKENDS[score.backend].attend(q, kv, rows, score.scale, total)
    return (out.astype(q.dtype) if last else out), lse


def seen_only(dout: jax.Array, dlse: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cotangents, 0 for queries that see nothing: whatever reaches those, NaN of a merge too, concerns no key."""
    seen = lse > -jnp.inf
    return jnp.where(seen[..., None], dout, 0), jnp.where(seen, dlse, 0)


def row_delta(out: jax.Array, dout: jax.Array, dlse: jax.Array) -> jax.Array:
    """[b s h] of ``sum_e dout * out - dlse``: what the softmax takes off every score's gradient."""
    # As a product: XLA's sum on a CPU sets aside five arrays of out's size and takes 35 times as long (jax 0.10.2).
    return jnp.einsum("bshe,bshe->bsh", dout.astype(dlse.dtype), out.astype(dlse.dtype), precision=lax.Precision.HIGHEST) - dlse


def zero_gradient(x: jax.Array) -> jax.Array:
    """Zeros like ``x`` in the accumulation dtype."""
    return jnp.zeros_like(x, dtype=accumulation_dtype(x.dtype))


def attend_backward(
    q: jax.Array, kv: jax.Array, rows: jax.Array, score: Score, lse: jax.Array, delta: jax.Array, dout: jax.Array, dq: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(dq with the part of these keys added, dkv of these keys), both in the accumulation dtype."""
    return BACKENDS[score.backend].attend_backward(q, kv, rows, score.scale, lse, delta, dout, dq)
