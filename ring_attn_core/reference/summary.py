"""Reference summary attention in numpy: ``exact_summary`` in float64, ``plain_summary`` with the rounding of a single device.

A summary is a key and a value, pooled from tokens of a block. Each query takes one dense softmax over the tokens and summaries
that it sees. Nothing is divided among ranks, so this reference has neither rings nor partial summaries.
``exact_summary`` is in ``np.longdouble`` if q is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .oracle import Array, rounding, softmax


class SummaryAttended(NamedTuple):
    """The results ``out`` and ``lse`` (natural log), with the gradients of q, k, v and pool.

    Shapes: out [batch, tokens, heads, v_dim], lse [batch, tokens, heads].
    """

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dpool: Array | None = None


class SummaryFeatures(NamedTuple):
    """The arguments of ``summary_attention`` that change the result.

    ``block``: number of tokens per block. ``window``: minimum number of preceding tokens that a query sees individually.
    ``summaries``: number of summaries per block. ``pool``: the pooling queries [summaries, kv_heads, head_dim]; None means
    pooling="mean". ``key_mask``: bool [batch, tokens].
    """

    block: int
    window: int
    summaries: int = 1
    pool: Array | None = None
    key_mask: Array | None = None
    scale: float | None = None
    softcap: float | None = None


def exact_summary(q: Array, k: Array, v: Array, dout: Array, dlse: Array, features: SummaryFeatures) -> SummaryAttended:
    """Return summary attention and its gradients in float64 (longdouble if q is).
    In the natural order of tokens: q [b s h d], k [b s g d], v [b s g e], dout [b s h e], dlse [b s h]."""
    return _attention((q, k, v, dout, dlse), features, np.longdouble if q.dtype.itemsize >= 8 else np.float64, lambda x: x)


def plain_summary(
    q: Array, k: Array, v: Array, dout: Array, dlse: Array, features: SummaryFeatures, dtype: str
) -> SummaryAttended:
    """Compute ``exact_summary`` with the rounding of a single device in ``dtype``; sums and softmax are in at least float32.
    Probabilities, summaries and out are rounded, and the gradients of attention scores, pooling scores, summaries, q, k and v;
    lse and the gradient of pool are not."""
    working = np.float64 if dtype == "float64" else np.float32
    return _attention((q, k, v, dout, dlse), features, working, rounding(dtype))


def who_sees_what(length: int, features: SummaryFeatures) -> tuple[Array, Array]:
    """Return two masks: bool [length, length + blocks * summaries] and bool [blocks * summaries, length].
    The first says which tokens and then summaries each query sees, the second which tokens each summary pools."""
    block, m = features.block, features.summaries
    i, j = np.arange(length)[:, None], np.arange(length)
    first = block * (np.maximum(i - features.window, 0) // block)
    n, u = np.divmod(np.arange(-(-length // block) * m), m)
    if features.pool is None:
        part = block // m
        pooled_by = (j // part) == (n * m + u)[:, None]
    else:
        pooled_by = (j // block) == n[:, None]
    return np.concatenate([(first <= j) & (j <= i), (n + 1) * block <= first], 1), pooled_by


def _attention(
    arrays: tuple[Array, Array, Array, Array, Array], features: SummaryFeatures, dtype: Any, rounded: Callable[[Array], Array]
) -> SummaryAttended:
    q, k, v, dout, dlse = (x.astype(dtype) for x in arrays)
    (b, s, h, d), g, m = q.shape, k.shape[2], features.summaries
    scale = dtype(d**-0.5 if features.scale is None else features.scale)
    heads = lambda x: np.moveaxis(x.reshape(b, s, g, h // g, -1), 1, 3)  # [b g r s d]
    q, dout, dlse = heads(q), heads(dout), heads(dlse)
    k, v = np.moveaxis(k, 1, 2), np.moveaxis(v, 1, 2)  # [b g s d]
    keep = np.ones((b, s), bool) if features.key_mask is None else features.key_mask
    seen, pooled_by = who_sees_what(s, features)
    # Pooling: a softmax over the tokens of each summary.
    mine = pooled_by & keep[:, None]  # [b n s]
    pool = np.zeros((m, g, d), dtype) if features.pool is None else rounded(features.pool.astype(dtype))
    pool = np.tile(np.moveaxis(pool, 1, 0), (1, len(pooled_by) // m, 1))  # [g n d]
    pooled = softmax(np.where(mine[:, None], pool @ k.swapaxes(-1, -2) * dtype(d**-0.5), -np.inf))[0]
    pooled = rounded(pooled)
    kbar, vbar = rounded(pooled @ k), rounded(pooled @ v)
    count = mine.sum(-1) / (m if features.pool is not None else 1)
    # Attention over tokens and summaries, concatenated.
    keys, values = np.concatenate([k, kbar], 2)[:, :, None], np.concatenate([v, vbar], 2)[:, :, None]
    with np.errstate(divide="ignore"):
        stands_for = np.log(np.concatenate([keep, count], 1).astype(dtype))[:, None, None, None]  # -inf: masked
    scores, steepness = q @ keys.swapaxes(-1, -2) * scale, dtype(1)
    if features.softcap is not None:
        steepness = np.tanh(scores / dtype(features.softcap))
        scores, steepness = dtype(features.softcap) * steepness, 1 - steepness**2
    p, lse = softmax(np.where(seen, scores + stands_for, -np.inf))
    out = rounded(rounded(p) @ values)
    delta = (dout * out).sum(-1, keepdims=True) - np.where(np.isneginf(lse), 0, dlse)
    ds = rounded(p * (dout @ values.swapaxes(-1, -2) - delta) * steepness)
    dq = rounded(ds @ keys * scale)
    dkeys, dvalues = (ds.swapaxes(-1, -2) @ q * scale).sum(2), (rounded(p).swapaxes(-1, -2) @ dout).sum(2)
    dk, dkbar, dv, dvbar = dkeys[:, :, :s], rounded(dkeys[:, :, s:]), dvalues[:, :, :s], rounded(dvalues[:, :, s:])
    # The backward of the pooling.
    back = lambda x: x.swapaxes(-1, -2)
    delta = (dkbar * kbar).sum(-1, keepdims=True) + (dvbar * vbar).sum(-1, keepdims=True)
    dpooled = rounded(pooled * (dkbar @ back(k) + dvbar @ back(v) - delta))
    dk = dk + back(pooled) @ dkbar + back(dpooled) @ pool * dtype(d**-0.5)
    dv = dv + back(pooled) @ dvbar
    dpool = (dpooled @ k * dtype(d**-0.5)).sum(0).reshape(g, -1, m, d).sum(1)
    whole = lambda x: np.moveaxis(x, 3, 1).reshape(b, s, h, -1)
    gradients = rounded(np.moveaxis(dk, 1, 2)), rounded(np.moveaxis(dv, 1, 2))
    dpool = None if features.pool is None else np.moveaxis(dpool, 1, 0)
    return SummaryAttended(whole(out), whole(lse)[..., 0], whole(dq), *gradients, dpool)
