"""Attention of given shards: the state that is carried from step to step, and the backend that moves it on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from . import blockwise
from .blockwise import State
from .keys import Keys
from .score import Score
from .tiles import accumulation_dtype, valid_queries

BACKENDS = {"blockwise": blockwise}


def nothing(q: jax.Array, keys: Keys, rows: jax.Array, score: Score) -> State:
    """The (out, lse) of no keys at all, in the accumulation dtype: out 0, lse the sink; without sinks and at padding -inf."""
    b, s, h, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    out = jnp.zeros_like(q, shape=(b, s, h, keys.kv.shape[-1] - d), dtype=dtype)
    lse = jnp.full_like(q, -jnp.inf, shape=(b, s, h), dtype=dtype)
    if score.sinks is not None:
        lse = jnp.where(valid_queries(rows, s)[:, None], score.sinks.astype(dtype), lse)
    return out, lse


def attend(q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State, last: bool) -> State:
    """``total`` with the visible ones of ``keys`` merged in; the last step casts out to q's dtype."""
    out, lse = BACKENDS[score.backend].attend(q, keys, rows, score, total)
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
    q: jax.Array, keys: Keys, rows: jax.Array, score: Score, lse: jax.Array, delta: jax.Array, dout: jax.Array, dq: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(dq with the part of these keys added, dkv of these keys), both in the accumulation dtype."""
    return BACKENDS[score.backend].attend_backward(q, keys, rows, score, lse, delta, dout, dq)


def sink_gradient(score: Score, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
    """[h] of ``-sum_bs exp(sink - lse) delta``: a sink is a key whose value is 0. None without sinks."""
    if score.sinks is None:
        return None
    if lse.size == 0:  # zeros, made of the sinks: XLA (jax 0.10, 0.11) fails on a shard_map that uses only empty arrays
        return jnp.where(score.sinks == 0, score.sinks, 0)
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(score.sinks.astype(lse.dtype) - lse))
    return -jnp.sum(p * delta, (0, 1))
