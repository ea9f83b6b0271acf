"""The weighted sum of the cross-entropies of one rank's labels, and its gradients, by the core's model/chunks.py.

Traced values cannot raise an error. Instead, a label outside the vocabulary makes three results NaN: the total, the gradient of
that label's token, and the gradient of the head.

From hidden states the logits are computed chunk by chunk, so arrays [tokens, vocab] hold one chunk of tokens. Passed logits
are not split into chunks, but XLA fuses most arrays of this shape away. Logits and softmax are computed in at least float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..attend.tiles import accumulation_dtype
from ..axes import vary_alike
from ..layers.chunks import from_chunks, to_chunks


class Labels(NamedTuple):
    """The int32 ``labels`` of tokens, and their ``weights`` in at least float32, 0 at ignored labels. Weights None: all 1."""

    labels: jax.Array
    weights: jax.Array | None = None

    def weighted(self, x: jax.Array) -> jax.Array:
        return x if self.weights is None else x * self.weights.astype(x.dtype)


class ChunkSettings(NamedTuple):
    """The ignored label, and the maximum number of tokens in a chunk; a chunk has at least one token of each batch row.
    ``each``: the cross-entropy of each token is returned beside their sum."""

    ignored: int
    chunk: int
    each: bool = False


Sums = tuple[jax.Array, jax.Array | None]
"""A weighted sum of cross-entropies, in at least float32, and the summands, an array like the labels, if the settings ask."""


def order_free_sum(x: jax.Array) -> jax.Array:
    """Return the sum of ``x``, the same bits for any order of its numbers and any count of zeros among them.
    Pairs are added, and pairs of pairs, the largest numbers first."""
    x = jnp.sort(x.reshape(-1))
    x = x[jnp.argsort(-jnp.abs(x), stable=True)]
    while len(x) > 1:
        x = jnp.pad(x, (0, len(x) % 2))
        x = x[0::2] + x[1::2]
    return x.sum()


def sum_of_logits(logits: jax.Array, labels: Labels, settings: ChunkSettings) -> Sums:
    return _sum_of_logits(*vary_alike((), logits, labels), settings)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sum_of_logits(logits: jax.Array, labels: Labels, settings: ChunkSettings) -> Sums:
    return _entropy(logits, labels, settings)[0]


def _logits_forward(logits: jax.Array, labels: Labels, settings: ChunkSettings) -> tuple[Sums, Any]:
    sums, lse = _entropy(logits, labels, settings)
    return sums, (logits, labels, lse)


def _logits_backward(settings: ChunkSettings, kept: Any, dsums: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
    dtotal, _ = dsums
    logits, labels, lse = lax.optimization_barrier((*kept,))  # else XLA keeps the logits that the forward converted
    dlogits = (_dlogits(logits, labels, lse, settings) * dtotal).astype(logits.dtype)
    return lax.optimization_barrier(dlogits), None


_sum_of_logits.defvjp(_logits_forward, _logits_backward)


def sum_of_hidden(hidden: jax.Array, head: jax.Array, labels: Labels, settings: ChunkSettings) -> Sums:
    """Return the weighted sum of the cross-entropies of ``hidden head^T``, hidden [b s dim], head [vocab dim], labels [b s].

    Products are computed in hidden's dtype; the softmax and sums over tokens in at least float32.
    """
    wide = head.astype(accumulation_dtype(hidden.dtype))
    return _sum_of_hidden(*vary_alike((), hidden, wide, labels), settings)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sum_of_hidden(hidden: jax.Array, head: jax.Array, labels: Labels, settings: ChunkSettings) -> Sums:
    return _of_chunks(hidden, head, labels, settings, gradients=False)[0]


def _hidden_forward(hidden: jax.Array, head: jax.Array, labels: Labels, settings: ChunkSettings) -> tuple[Sums, Any]:
    sums, dhidden, dhead = _of_chunks(hidden, head, labels, settings, gradients=True)
    return sums, (dhidden, dhead)


def _hidden_backward(settings: ChunkSettings, kept: Any, dsums: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array, None]:
    (dhidden, dhead), (dtotal, _) = kept, dsums
    return (dhidden.astype(dtotal.dtype) * dtotal).astype(dhidden.dtype), dhead * dtotal, None


_sum_of_hidden.defvjp(_hidden_forward, _hidden_backward)


@partial(jax.jit, static_argnames=("settings", "gradients"))  # else each call outside jit would compile the loop again
def _of_chunks(
    hidden: jax.Array, head: jax.Array, labels: Labels, settings: ChunkSettings, *, gradients: bool
) -> tuple[Sums, Any, Any]:
    """Return (sums, dhidden, dhead), computed chunk by chunk. Without ``gradients`` both gradients are None."""
    weight, dtype, tokens = head.astype(hidden.dtype), head.dtype, hidden.shape[1]

    def step(carry: Any, chunk: Any) -> tuple[Any, Any]:
        (total, dhead), (x, labels) = carry, chunk
        x = jnp.where((labels.labels != settings.ignored)[..., None], x, 0)  # hidden states of ignored labels may be NaN
        logits = jnp.einsum("bcd,vd->bcv", x, weight, preferred_element_type=dtype)
        part, lse = _entropy(logits, labels, settings)
        total, each = total + part[0], part[1]
        if not gradients:
            return (total, None), (each, None)
        dlogits = _dlogits(logits, labels, lse, settings).astype(x.dtype)
        dhead = dhead + jnp.einsum("bcv,bcd->vd", dlogits, x, preferred_element_type=dtype)
        return (total, dhead), (each, jnp.einsum("bcv,vd->bcd", dlogits, weight))

    length = max(settings.chunk // max(hidden.shape[0], 1), 1)
    weights = None if labels.weights is None else to_chunks(labels.weights, length)
    chunks = to_chunks(hidden, length), Labels(to_chunks(labels.labels, length, settings.ignored), weights)
    zeros = jnp.zeros((), dtype), jnp.zeros(head.shape, dtype) if gradients else None
    zeros, _ = vary_alike((), zeros, hidden)
    (total, dhead), by_chunks = lax.scan(step, zeros, chunks)
    each, dhidden = [None if x is None else from_chunks(x, tokens) for x in by_chunks]
    return (total, each), dhidden, dhead


def _entropy(logits: jax.Array, target: Labels, settings: ChunkSettings) -> tuple[Sums, jax.Array]:
    """Return the sums, and the log-sum-exp of each token. The first sum is NaN if a label is outside the vocabulary."""
    labels = target.labels
    wide, kept = logits.astype(accumulation_dtype(logits.dtype)), labels != settings.ignored
    lse = jax.nn.logsumexp(wide, -1)
    index = jnp.where(kept, jnp.where(labels < 0, logits.shape[-1], labels), 0)  # negative indices count from the end
    chosen = jnp.take_along_axis(logits, index[..., None], -1, mode="fill")[..., 0].astype(wide.dtype)
    each = target.weighted(jnp.where(kept, lse - chosen, 0))
    return (each.sum(), each if settings.each else None), lse


def _dlogits(logits: jax.Array, target: Labels, lse: jax.Array, settings: ChunkSettings) -> jax.Array:
    """Return the gradient of the logits in at least float32: 0 at ignored labels, NaN at others outside the vocabulary."""
    labels = target.labels
    tokens = jnp.arange(logits.shape[-1], dtype=labels.dtype).reshape(*[1] * labels.ndim, -1)
    p = jnp.exp(logits.astype(lse.dtype) - lse[..., None]) - (labels[..., None] == tokens).astype(lse.dtype)
    wrong = (labels < 0) | (labels >= logits.shape[-1])
    p = p if target.weights is None else p * target.weights[..., None].astype(p.dtype)
    return jnp.where((labels != settings.ignored)[..., None], jnp.where(wrong[..., None], jnp.nan, p), 0)
