"""The next token of each request, drawn from its logits on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ring_attn_core.sampling import Choice, words

from ..attend.dropout import multiply
from ..attend.tiles import accumulation_dtype


def sample(logits: jax.Array, choice: Choice, requests: jax.Array, positions: jax.Array) -> jax.Array:
    """int32 [b]: the tokens of ``requests`` [b] at ``positions`` [b], of logits [b vocab], as ``choice`` says.

    What :mod:`ring_attn_core.sampling` describes, in float32 (float64 for float64).
    """
    if choice.temperature is None:
        return logits.argmax(-1).astype(jnp.int32)
    wide = logits.astype(accumulation_dtype(logits.dtype))
    scores = (wide - wide.max(-1, keepdims=True)) / choice.temperature
    tokens = jnp.broadcast_to(jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape)
    if choice.top_k is not None or choice.top_p is not None:
        tokens = jnp.argsort(scores, axis=-1, descending=True, stable=True).astype(jnp.int32)
        scores = jnp.take_along_axis(scores, tokens, -1)
        if choice.top_k is not None:
            rank = jnp.arange(scores.shape[-1], dtype=jnp.int32)
            scores = jnp.where(rank >= choice.top_k, -jnp.inf, scores)
        if choice.top_p is not None:
            p = jax.nn.softmax(scores, -1)
            scores = jnp.where(p.cumsum(-1) - p >= choice.top_p, -jnp.inf, scores)
    best = (scores + gumbel(choice, requests, positions, tokens, scores.dtype)).argmax(-1, keepdims=True)
    return jnp.take_along_axis(tokens, best, -1)[:, 0]


def gumbel(choice: Choice, requests: jax.Array, positions: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """[b n]: the noise of each of ``tokens`` [b n], -log of exponential numbers that come from 32 random bits each."""
    word = lambda x: x.astype(jnp.uint32)
    at = word(requests)[:, None], word(positions)[:, None]
    bits = words((choice.low, choice.high), *at, word(tokens), (multiply, jnp.uint32))
    uniform = jnp.minimum((bits.astype(dtype) + 0.5) * 2.0**-32, 1 - 2.0**-24)  # float32 would round some of them to 1
    return -jnp.log(-jnp.log1p(-uniform))
