"""Reference attention in numpy: ``exact`` in float64, ``plain`` with the rounding of a single device in a given dtype.

Both take global arrays in the natural order of tokens, without rings or layouts. ``plain`` computes in float32, or in float64 for
the dtype float64. It rounds probabilities, score gradients, out, dq, dk and dv once each to the dtype. ``exact`` is in
``np.longdouble`` if q is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..dropout import keep_mask, rescale
from ..runs import Band

Array = np.ndarray


class Attention(NamedTuple):
    """The results ``out`` and ``lse`` (natural log), with the gradients of q, k, v and sinks.

    Shapes: out [batch, queries, heads, v_dim], lse [batch, queries, heads], sinks [heads].
    """

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None = None


class Features(NamedTuple):
    """Optional arguments of ``ring_attention`` that change scores, visibility or probabilities."""

    scale: float | None = None
    extents: Array | None = None
    """int [batch, queries, 2]: first and end (exclusive) of the key positions that each query may see."""
    key_mask: Array | None = None
    """bool [batch, keys]: True for keys that may be seen."""
    softcap: float | None = None
    sinks: Array | None = None
    """[heads]: one more logit, without a value, in the softmax denominator of each query."""
    alibi_slopes: Array | None = None
    """[heads]: constants without a gradient."""
    dropout_rate: float = 0.0
    dropout_seed: int | None = None
    key_extents: Array | None = None
    """int [batch, keys, 2]: first and end (exclusive) of the query positions that may see each key."""


def exact(q: Array, k: Array, v: Array, mask: Band, dout: Array, dlse: Array | None = None, **features: Any) -> Attention:
    """Return attention and its gradients in float64, or in ``np.longdouble`` if q is float64.

    Shapes: q [b s h d], k [b t g d], v [b t g e], dout [b s h e], dlse [b s h] (None: 0), with b batch rows, s queries, t keys, h
    query heads, g kv heads, head dim d of q and k, and head dim e of v. Query head h reads kv head h // (heads / kv_heads).
    ``features``: fields of Features. With j over the keys that query i sees:

        s_ij  = scale q_i . k_j; then s_ij = softcap tanh(s_ij / softcap); then s_ij = s_ij + slope (k_pos - q_pos)
        lse_i = log(sum_j exp s_ij + exp sink)
        out_i = sum_j p_ij v_j with p_ij = exp(s_ij - lse_i)

    Dropout sets some p_ij of out_i to 0 and rescales the others. A fully masked query has out 0 and lse -inf. With sinks, its lse
    is the sink of the head. Such a query adds nothing to the gradients of q, k and v.
    """
    working = np.longdouble if q.dtype.itemsize >= 8 else np.float64
    return _attention(_Arrays(q, k, v, dout, dlse), mask, Features(**features), working, lambda x: x)


def plain(
    q: Array, k: Array, v: Array, mask: Band, dout: Array, dtype: str, dlse: Array | None = None, **features: Any
) -> Attention:
    """Compute the results of ``exact`` with the rounding of a single device that computes in ``dtype``."""
    working = np.float64 if dtype == "float64" else np.float32
    return _attention(_Arrays(q, k, v, dout, dlse), mask, Features(**features), working, rounding(dtype))


def visible(
    mask: Band,
    queries: range,
    keys: range,
    extents: Array | None = None,
    key_mask: Array | None = None,
    key_extents: Array | None = None,
) -> Array:
    """Return bool [batch, queries, keys]: whether the query sees the key; ``mask`` alone gives batch 1. Positions are global."""
    i, j = np.array(queries)[:, None], np.array(keys)
    seen = np.ones((1, len(queries), len(keys)), bool)
    if mask.lo is not None:
        seen = seen & (i - j >= mask.lo)
    if mask.hi is not None:
        seen = seen & (i - j <= mask.hi)
    if extents is not None:
        first, end = np.moveaxis(extents[:, queries.start : queries.stop, :, None], 2, 0)
        seen = seen & (first <= j) & (j < end)
    if key_extents is not None:
        first, end = np.moveaxis(key_extents[:, None, keys.start : keys.stop], 3, 0)
        seen = seen & (first <= i) & (i < end)
    if key_mask is not None:
        seen = seen & key_mask[:, None, keys.start : keys.stop]
    return seen


def rounding(dtype: str) -> Callable[[Array], Array]:
    """Return a function that rounds a float32 array to a 16-bit ``dtype`` and returns float32; the identity for wider dtypes."""
    if dtype == "bfloat16":
        return _to_bfloat16
    if dtype == "float16":
        return lambda x: x.astype(np.float16).astype(np.float32)
    return lambda x: x


def softmax(scores: Array, count: Any = 1) -> tuple[Array, Array]:
    """Return probabilities, and lse [..., 1], with each key counted ``count`` times. If all counts are 0, return 0 and -inf."""
    scores = np.where(count > 0, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0, top).astype(scores.dtype)
    p = count * np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return p / np.where(total > 0, total, 1), np.log(total) + top


def _to_bfloat16(x: Array) -> Array:
    """Round float32 to bfloat16 precision, to nearest with ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x).astype(np.float32)


class _Arrays(NamedTuple):
    """The inputs of attention, with the gradients of out and lse. A ``dlse`` of None means 0."""

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None


BLOCK = 512
"""Number of queries whose scores are computed at a time, to limit memory."""


def _attention(arrays: _Arrays, mask: Band, features: Features, dtype: Any, rounded: Callable[[Array], Array]) -> Attention:
    q, k, v, dout, dlse = arrays
    b, s, h, d = q.shape
    t, g, e = v.shape[1:]
    scale = dtype(d**-0.5 if features.scale is None else features.scale)
    # [b g r s d]: the query heads of one kv head side by side
    grouped = lambda x: np.moveaxis(x.astype(dtype).reshape(b, s, g, h // g, x.shape[-1]), 1, 3)
    per_head = lambda x: x.astype(dtype).reshape(g, h // g, 1, 1)
    q_, dout_ = grouped(q), grouped(dout)
    dlse_ = grouped(np.zeros((b, s, h, 1)) if dlse is None else dlse[..., None])
    k_, v_ = (np.moveaxis(x.astype(dtype), 1, 2)[:, :, None] for x in (k, v))
    sink = per_head(np.full(h, -np.inf) if features.sinks is None else features.sinks)
    out, lse, dq = np.zeros_like(dout_), np.full_like(dlse_, -np.inf), np.zeros_like(q_)
    dk, dv, dsinks = np.zeros_like(k_), np.zeros_like(v_), np.zeros_like(sink)
    for i0 in range(0, s, BLOCK):
        i1 = min(i0 + BLOCK, s)
        j0 = 0 if mask.hi is None else min(max(i0 - mask.hi, 0), t)
        j1 = t if mask.lo is None else min(max(i1 - mask.lo, j0), t)
        rows, keys = np.s_[..., i0:i1, :], np.s_[..., j0:j1, :]
        hiding = features.extents, features.key_mask, features.key_extents
        seen = visible(mask, range(i0, i1), range(j0, j1), *hiding)[:, None, None]
        scores, steepness = _softcap((q_[rows] @ k_[keys].swapaxes(-1, -2)) * scale, features.softcap)
        if features.alibi_slopes is not None:
            scores = scores + per_head(features.alibi_slopes) * (np.arange(j0, j1) - np.arange(i0, i1)[:, None]).astype(dtype)
        scores = np.where(seen, scores, -np.inf)
        top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
        top = np.where(np.isneginf(top), 0, top).astype(dtype)
        p, sink_weight = np.exp(scores - top), np.exp(sink - top)
        total = p.sum(-1, keepdims=True) + sink_weight
        something = total > 0
        total = np.where(something, total, 1)
        p, sink_weight = p / total, sink_weight / total
        weight = _dropout(features, (b, g, h // g), range(i0, i1), range(j0, j1)).astype(dtype)
        dropped = rounded(p * weight)
        lse[rows] = np.where(something, np.log(total) + top, -np.inf)
        out[rows] = rounded(dropped @ v_[keys])
        delta = (dout_[rows] * out[rows]).sum(-1, keepdims=True) - np.where(something, dlse_[rows], 0)
        ds = rounded(p * (dout_[rows] @ v_[keys].swapaxes(-1, -2) * weight - delta) * steepness)
        dq[rows] = (ds @ k_[keys]) * scale
        dk[keys] += ((ds.swapaxes(-1, -2) @ q_[rows]) * scale).sum(2, keepdims=True)
        dv[keys] += (dropped.swapaxes(-1, -2) @ dout_[rows]).sum(2, keepdims=True)
        dsinks -= (sink_weight * delta).sum((0, 3), keepdims=True)[0]
    whole = lambda x: np.moveaxis(x, 3, 1).reshape(b, s, h, x.shape[-1])
    back = lambda x: rounded(np.moveaxis(x[:, :, 0], 2, 1))
    gradients = rounded(whole(dq)), back(dk), back(dv), None if features.sinks is None else dsinks.reshape(h)
    return Attention(whole(out), whole(lse)[..., 0], *gradients)


def _softcap(scores: Array, cap: float | None) -> tuple[Array, Array | float]:
    """Return ``cap * tanh(scores / cap)`` and its derivative by the scores. If ``cap`` is None, return the scores and 1."""
    if cap is None:
        return scores, 1.0
    bounded = np.tanh(scores / scores.dtype.type(cap))
    return scores.dtype.type(cap) * bounded, 1 - bounded * bounded


def _dropout(features: Features, groups: tuple[int, int, int], queries: range, keys: range) -> Array:
    """Return dropout's factors of probabilities [*groups, queries, keys]: 0 or ``rescale(rate)``; without dropout, [1].
    ``groups``: (batch, kv heads, query heads per kv head)."""
    if not features.dropout_rate:
        return np.ones(1)
    b, g, r = groups
    keeps = keep_mask(features.dropout_seed, features.dropout_rate, b, g * r, queries, keys)  # type: ignore[arg-type]
    return keeps.reshape(*groups, len(queries), len(keys)) * rescale(features.dropout_rate)
