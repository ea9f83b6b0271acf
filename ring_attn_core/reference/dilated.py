"""Reference dilated attention in numpy, computed from its definition without folding or rings.

A pattern is a segment length and a dilation. It lets query i of head h see key j if both are in the same segment, if both
offsets in the segment are congruent to h modulo the dilation, and if mask and key mask allow the pair. With n_ij the number of
patterns of head h that allow (i, j),

    Z_i = sum_j n_ij exp(s_ij)        out_i = sum_j n_ij exp(s_ij) v_j / Z_i        lse_i = log Z_i

This is LongNet's mixture, in which each pattern is weighted by its softmax denominator (arXiv:2307.02486, equation 10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..runs import Band
from .oracle import BLOCK, Array, Attention, rounding, softmax


class DilatedFeatures(NamedTuple):
    """The arguments of ``dilated_attention`` that change the result. ``key_mask``: bool [batch, tokens]."""

    segments: Sequence[int]
    dilations: Sequence[int]
    mixing: str = "softmax"
    mask: Band = Band(0)
    key_mask: Array | None = None
    scale: float | None = None
    softcap: float | None = None


def exact(q: Array, k: Array, v: Array, dout: Array, dlse: Array, call: DilatedFeatures) -> Attention:
    """Return dilated attention of global arrays and its gradients in float64, or in ``np.longdouble`` if q is float64.

    Shapes: q [b s h d], k [b s g d], v [b s g e], dout [b s h e], dlse [b s h], with b batch rows, s tokens, h query heads, g kv
    heads, head dim d of q and k, and head dim e of v. Query head h reads kv head h // (heads / kv_heads). A query that sees no
    key in any pattern has out 0, lse -inf and gradient 0.
    """
    working = np.longdouble if q.dtype.itemsize >= 8 else np.float64
    at_once = lambda counts: counts.sum(0, keepdims=True)
    return _attention((q, k, v, dout, dlse), call, working, lambda x: x, at_once)


def plain(q: Array, k: Array, v: Array, dout: Array, dlse: Array, call: DilatedFeatures, dtype: str) -> Attention:
    """Compute ``exact`` as one device does in ``dtype``: one rounded out for each pattern, weighted by softmax denominators."""
    working = np.float64 if dtype == "float64" else np.float32
    return _attention((q, k, v, dout, dlse), call, working, rounding(dtype), lambda counts: counts)


def patterns(call: DilatedFeatures, heads: int, queries: Array, keys: Array) -> Array:
    """Return int8 [patterns, heads, queries, keys]: 1 if the pattern lets the query see the key, apart from mask and key mask.
    ``queries``, ``keys``: 1-D int positions. With mixing="heads" each head uses one pattern; all other entries are 0."""
    n, i, j = len(call.segments), queries[:, None], keys
    counts = np.zeros((n, heads, len(queries), len(keys)), np.int8)
    for at, (segment, dilation) in enumerate(zip(call.segments, call.dilations, strict=True)):
        together = i // segment == j // segment
        for h in range(heads):
            if call.mixing == "softmax" or h * n // heads == at:
                kept_i, kept_j = (p % segment % dilation == h % dilation for p in (i, j))
                counts[at, h] = together & kept_i & kept_j
    return counts


def _attention(
    arrays: tuple[Array, ...],
    call: DilatedFeatures,
    dtype: Any,
    rounded: Callable[[Array], Array],
    apart: Callable[[Array], Array],
) -> Attention:
    """Compute dilated attention and its gradients. ``rounded``: round an array to the precision of the inputs. ``apart``: map
    ``patterns`` to counts [softmaxes, heads, queries, keys] of each key. Outs of several softmaxes are weighted by
    denominators."""
    b, s, h, d = arrays[0].shape
    share = h // arrays[1].shape[2]
    by_head = lambda x: np.moveaxis(x.astype(dtype), 2, 1)  # [b h s d]
    q, dout, dlse = by_head(arrays[0]), by_head(arrays[3]), by_head(arrays[4][..., None])
    k, v = (by_head(np.repeat(x, share, 2)) for x in arrays[1:3])
    scale = dtype(d**-0.5 if call.scale is None else call.scale)
    out, lse, dq, dk, dv = np.zeros_like(dout), np.full_like(dlse, -np.inf), *map(np.zeros_like, (q, k, v))
    positions = np.arange(s)
    for i0 in range(0, s, BLOCK):
        i = positions[i0 : i0 + BLOCK]
        j0 = 0 if call.mask.hi is None else min(max(i0 - call.mask.hi, 0), s)
        j = positions[j0 : s if call.mask.lo is None else min(max(int(i[-1]) + 1 - call.mask.lo, j0), s)]
        lag = i[:, None] - j
        seen = (lag >= (-s if call.mask.lo is None else call.mask.lo)) & (lag <= (s if call.mask.hi is None else call.mask.hi))
        if call.key_mask is not None:
            seen = seen & call.key_mask[:, None, None, j]
        rows, keys = np.s_[:, :, i], np.s_[:, :, j]
        scores, steepness = (q[rows] @ k[keys].swapaxes(-1, -2)) * scale, 1.0
        if call.softcap is not None:
            bounded = np.tanh(scores / dtype(call.softcap))
            scores, steepness = dtype(call.softcap) * bounded, 1 - bounded * bounded
        softmaxes = [softmax(scores, np.where(seen, count, 0)) for count in apart(patterns(call, h, i, j))]
        outs = [rounded(rounded(p) @ v[keys]) for p, _ in softmaxes]
        lse[rows], alphas = _weights([lse_i for _, lse_i in softmaxes])
        out[rows] = rounded(np.sum([alpha * x for alpha, x in zip(alphas, outs, strict=True)], 0))
        douts = [rounded(alpha * dout[rows]) for alpha in alphas]
        dots = [(x * y).sum(-1, keepdims=True) for x, y in zip(douts, outs, strict=True)]
        rest = np.sum(dots, 0) - np.where(np.isneginf(lse[rows]), 0, dlse[rows])
        for (p, _), alpha, dout_i in zip(softmaxes, alphas, douts, strict=True):
            ds = rounded(p * (dout_i @ v[keys].swapaxes(-1, -2) - alpha * rest) * steepness)
            dq[rows] += (ds @ k[keys]) * scale
            dk[keys] += (ds.swapaxes(-1, -2) @ q[rows]) * scale
            dv[keys] += rounded(p).swapaxes(-1, -2) @ dout_i
    back = lambda x: rounded(np.moveaxis(x, 1, 2))
    sum_heads = lambda x: rounded(np.moveaxis(x.reshape(b, h // share, share, s, -1).sum(2), 1, 2))
    return Attention(back(out), np.moveaxis(lse, 1, 2)[..., 0], back(dq), sum_heads(dk), sum_heads(dv))


def _weights(lses: list[Array]) -> tuple[Array, list[Array]]:
    """Return the lse of all softmaxes together, and the weight of each softmax: its denominator over the sum of denominators."""
    top = np.maximum.reduce(lses)
    top = np.where(np.isneginf(top), 0, top).astype(top.dtype)
    each = [np.exp(x - top) for x in lses]
    total = np.sum(each, 0)
    with np.errstate(divide="ignore"):
        return np.log(total) + top, [x / np.where(total > 0, total, 1) for x in each]
