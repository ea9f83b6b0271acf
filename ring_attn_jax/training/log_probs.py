"""Each label's log-probability and each token's entropy, by the formulas of the core's model/chunks.py.

The backward recomputes logits from hidden states. For memory and precision see ``cross_entropy.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ring_attn_core.model.chunks import check_dtypes, check_loss, check_temperature
from ring_attn_core.validation import check_integer

from ..attend.tiles import accumulation_dtype
from ..axes import on_auto_axes, sharded_like, vary_alike
from ..layers.chunks import from_chunks, to_chunks
from .loss import _check_arrays, int32_labels


class LogProbSettings(NamedTuple):
    """The ignored label, the maximum tokens in a chunk, whether to return the entropy, and the divisor of the logits."""

    ignored: int
    chunk: int
    entropy: bool
    temperature: float


def token_log_probs(
    logits: jax.Array,
    labels: jax.Array,
    *,
    head: jax.Array | None = None,
    chunk: int = 4096,
    entropy: bool = False,
    ignore_index: int = -100,
    temperature: float = 1.0,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return the log-probability [b s] of each label, or with ``entropy`` the pair (log-probability, entropy).

    Both are in at least float32. They are 0 if the label is ``ignore_index``. They are NaN if the label is outside the
    vocabulary, because traced values cannot raise. ``logits``: [b s vocab]. ``labels`` int [b s]: the next token of each token,
    as ``pack_rollouts`` and ``shard_batch`` return it.

    ``temperature``: the logits are divided by this number first, as for sampling.

    ``head`` [vocab, dim]: if it is passed, the first argument is the hidden states [b s dim]. The logits ``hidden head^T`` are
    then computed for ``chunk`` tokens at a time, and again in the backward. Products are in hidden's dtype; softmax and sums over
    tokens, such as the head's gradient, are in at least float32. Second derivatives are not supported.

    Each rank computes its own tokens, and the forward does not communicate. Raise ValueError if shapes or dtypes do not fit, or
    if ``ignore_index`` is traced.
    """
    _check_arrays({"logits": logits, "labels": labels} | ({} if head is None else {"head": head}))
    check_integer("ignore_index", ignore_index, static=True)
    check_dtypes(str(logits.dtype), str(labels.dtype))
    check_loss(logits.shape, labels.shape, None if head is None else head.shape, chunk, "sum")
    check_temperature(temperature)
    x = logits.reshape(-1, *logits.shape[-2:]) if logits.ndim != 3 else logits
    tokens = int32_labels(labels).reshape(x.shape[:2])
    wide = None if head is None else head.astype(accumulation_dtype(x.dtype))
    varying = vary_alike((), x, wide, tokens)
    spec = PartitionSpec(*sharded_like(x)[:2])
    settings = LogProbSettings(int(ignore_index), chunk, entropy, temperature)
    values = on_auto_axes(partial(_values, settings=settings), (spec, spec) if entropy else (spec,))(*varying)
    shaped = tuple(each.reshape(labels.shape) for each in values)
    return shaped if entropy else shaped[0]  # type: ignore[return-value]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _values(x: jax.Array, head: jax.Array | None, labels: jax.Array, settings: LogProbSettings) -> tuple[jax.Array, ...]:
    return _forward(x, head, labels, settings)[0]


@partial(jax.jit, static_argnames="settings")  # else each call outside jit would compile the loop over chunks again
def _forward(
    x: jax.Array, head: jax.Array | None, labels: jax.Array, settings: LogProbSettings
) -> tuple[tuple[jax.Array, ...], Any]:
    if head is None:
        values, lse = _of_logits(x, labels, settings)
        return values, (x, head, labels, lse, values)
    weight, length = head.astype(x.dtype), _length(x, settings)
    step = lambda chunk: _of_logits(_logits(chunk[0], weight, chunk[1], settings)[1], chunk[1], settings)
    chunks = lax.map(step, (to_chunks(x, length), to_chunks(labels, length, settings.ignored)))
    values, lse = jax.tree.map(lambda each: from_chunks(each, x.shape[1]), chunks)
    return values, (x, head, labels, lse, values)


@partial(jax.jit, static_argnames="settings")
def _backward(settings: LogProbSettings, kept: Any, dvalues: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array | None, None]:
    x, head, labels, lse, values = lax.optimization_barrier(kept)  # else XLA keeps the logits that the forward converted
    if head is None:
        dx = _dlogits(x, labels, lse, values, dvalues, settings).astype(x.dtype)
        return lax.optimization_barrier(dx), None, None
    weight, length = head.astype(x.dtype), _length(x, settings)

    def step(dhead: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        (x, labels), *chunk_arrays = chunk
        x, logits = _logits(x, weight, labels, settings)
        dlogits = _dlogits(logits, labels, *chunk_arrays, settings=settings).astype(x.dtype)
        dhead = dhead + jnp.einsum("bcv,bcd->vd", dlogits, x, preferred_element_type=head.dtype)
        return dhead, jnp.einsum("bcv,vd->bcd", dlogits, weight)

    rest = jax.tree.map(lambda each: to_chunks(each, length), (lse, values, dvalues))
    zeros, _ = vary_alike((), jnp.zeros(head.shape, head.dtype), x)
    tokens = to_chunks(x, length), to_chunks(labels, length, settings.ignored)
    dhead, dx = lax.scan(step, zeros, (tokens, *rest))
    return from_chunks(dx, x.shape[1]), dhead, None


_values.defvjp(_forward, _backward)


def _length(x: jax.Array, settings: LogProbSettings) -> int:
    return max(settings.chunk // max(x.shape[0], 1), 1)


def _logits(x: jax.Array, weight: jax.Array, labels: jax.Array, settings: LogProbSettings) -> tuple[jax.Array, jax.Array]:
    """Return (``x`` [b c dim] with 0 at ignored labels, where it may be NaN, its logits [b c vocab] in at least float32)."""
    x = jnp.where((labels != settings.ignored)[..., None], x, 0)
    return x, jnp.einsum("bcd,vd->bcv", x, weight, preferred_element_type=accumulation_dtype(x.dtype))


def _wide(logits: jax.Array, settings: LogProbSettings) -> jax.Array:
    return logits.astype(accumulation_dtype(logits.dtype)) / settings.temperature


def _of_logits(logits: jax.Array, labels: jax.Array, settings: LogProbSettings) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return ((log-probability, entropy if requested), log-sum-exp): 0 at ignored labels, NaN at labels out of range."""
    wide, kept = _wide(logits, settings), labels != settings.ignored
    lse = jax.nn.logsumexp(wide, -1)
    wrong = (labels < 0) | (labels >= logits.shape[-1])
    index = jnp.where(wrong, 0, labels)[..., None]
    chosen = _wide(jnp.take_along_axis(logits, index, -1)[..., 0], settings)
    shown = lambda each: jnp.where(kept, jnp.where(wrong, jnp.nan, each), 0)
    if not settings.entropy:
        return (shown(chosen - lse),), lse
    logp = wide - lse[..., None]
    p = jnp.exp(logp)
    return (shown(chosen - lse), shown(-jnp.where(p == 0, 0, p * logp).sum(-1))), lse


def _dlogits(
    logits: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    values: tuple[jax.Array, ...],
    dvalues: tuple[jax.Array, ...],
    settings: LogProbSettings,
) -> jax.Array:
    """Return the cotangent of the logits in at least float32: 0 at ignored labels, NaN at labels outside the vocabulary."""
    tokens = jnp.arange(logits.shape[-1], dtype=labels.dtype).reshape(*[1] * labels.ndim, -1)
    logp = _wide(logits, settings) - lse[..., None]
    p = jnp.exp(logp)
    dlogits = dvalues[0][..., None] * ((labels[..., None] == tokens).astype(p.dtype) - p)
    if settings.entropy:
        dlogits = dlogits - jnp.where(p == 0, 0, p * (logp + values[1][..., None])) * dvalues[1][..., None]
    wrong = (labels < 0) | (labels >= logits.shape[-1])
    return jnp.where(
        (labels != settings.ignored)[..., None], jnp.where(wrong[..., None], jnp.nan, dlogits / settings.temperature), 0
    )
