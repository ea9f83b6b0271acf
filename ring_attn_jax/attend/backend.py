"""Attention of given shards: the state that is carried from step to step, and the backend that moves it on."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from . import blockwise
from . import kernels as fused
from .keys import Keys
from .score import Score
from .state import Cotangents, Gradients, State
from .tiles import accumulation_dtype, valid_queries


def attend(q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State | None, last: bool) -> State:
    """``total`` (None: of no keys yet) with the visible ones of ``keys`` merged in; the last step gives out in q's dtype."""
    if score.call is not None:
        return fused.attend(q, keys, rows, score, total, last)
    out, lse = blockwise.attend(q, keys, rows, score, nothing(q, keys, rows, score) if total is None else total)
    return (out.astype(q.dtype) if last else out), lse


def nothing(q: jax.Array, keys: Keys, rows: jax.Array, score: Score) -> State:
    """The (out, lse) of no keys at all, in the accumulation dtype: out 0, lse the sink; without sinks and at padding -inf."""
    b, s, h, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    out = jnp.zeros_like(q, shape=(b, s, h, keys.kv.shape[-1] - d), dtype=dtype)
    lse = jnp.full_like(q, -jnp.inf, shape=(b, s, h), dtype=dtype)
    if score.sinks is not None:
        lse = jnp.where(valid_queries(rows, s)[:, None], score.sinks.astype(dtype), lse)
    return out, lse


def cotangents(
    q: jax.Array, keys: Keys, rows: jax.Array, score: Score, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array
) -> Cotangents:
    """What the backward needs of every query; 0 for those that see nothing: what reaches them, NaN too, concerns no key."""
    if score.call is not None:
        return fused.cotangents(q, keys, rows, score, out, lse, dout, dlse)
    seen = lse > -jnp.inf
    dout, dlse = jnp.where(seen[..., None], dout, 0), jnp.where(seen, dlse, 0)
    # As a product: XLA's sum on a CPU sets aside five arrays of out's size and takes 35 times as long (jax 0.10.2).
    of_out = jnp.einsum("bshe,bshe->bsh", dout.astype(lse.dtype), out.astype(lse.dtype), precision=lax.Precision.HIGHEST)
    return Cotangents(q, dout, lse, of_out - dlse)


def attend_backward(
    of_q: Cotangents,
    keys: Keys,
    rows: jax.Array,
    score: Score,
    dq: jax.Array | None,
    arrived: Callable[[], jax.Array | None],
    last: bool,
) -> tuple[jax.Array, Gradients]:
    """``dq`` (None: nothing yet) with the part of these keys added, and dkv of these keys added to what ``arrived`` for them.

    In the accumulation dtype, or in q's where nothing will be added any more.
    """
    if score.call is not None:
        return fused.attend_backward(of_q, keys, rows, score, dq, arrived, last)
    total = jnp.zeros_like(of_q.q, dtype=accumulation_dtype(of_q.q.dtype)) if dq is None else dq
    total, dkv = blockwise.attend_backward(of_q, keys, rows, score, total)
    before = arrived()
    return total, dkv if before is None else before + dkv


def sink_gradient(score: Score, lse: jax.Array, of_q: Cotangents) -> jax.Array | None:
    """[h] of ``-sum_bs exp(sink - lse) delta``: a sink is a key whose value is 0. None without sinks."""
    if score.sinks is None:
        return None
    if lse.size == 0:  # zeros, made of the sinks: XLA (jax 0.10, 0.11) fails on a shard_map that uses only empty arrays
        return jnp.where(score.sinks == 0, score.sinks, 0)
    delta = of_q.delta if score.call is None else of_q.delta.swapaxes(1, 2)
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(score.sinks.astype(lse.dtype) - lse))
    return -jnp.sum(p * delta, (0, 1))
