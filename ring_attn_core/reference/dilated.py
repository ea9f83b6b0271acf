"""The truth of dilated attention, in numpy, from its definition over token positions: it knows nothing of lanes or rings.

A pattern lets query i see key j for head h where both stand in the same segment, at offsets that the head keeps, and the mask and
the key mask let it. With n_ij the number of patterns of the head that do,

    Z_i = sum_j n_ij exp(s_ij)        out_i = sum_j n_ij exp(s_ij) v_j / Z_i        lse_i = log Z_i

which is LongNet's mixture, each pattern weighted by its denominator (arXiv:2307.02486, equation 10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..runs import Band
from .oracle import BLOCK, Array, Attention, rounding


class Dilated(NamedTuple):
    """What changes the attention, named as in ``dilated_attention``. ``mask`` is a Band, ``key_mask`` bool [b s]."""

    segments: Sequence[int]
    dilations: Sequence[int]
    mixing: str = "softmax"
    mask: Band = Band(0)
    key_mask: Array | None = None
    scale: float | None = None
    softcap: float | None = None


def exact(q: Array, k: Array, v: Array, dout: Array, dlse: Array, call: Dilated) -> Attention:
    """Dilated attention of whole arrays and its gradients in float64 (of float64 arrays: in extended precision).

    q [b s h d], k [b s g d], v [b s g e], dout [b s h e], dlse [b s h]; query head h reads kv head h // (heads / kv_heads).
    A query that sees nothing in any pattern: out 0, lse -inf, no gradient.
    """
    working = np.longdouble if q.dtype.itemsize >= 8 else np.float64
    return _attention((q, k, v, dout, dlse), call, working, lambda x: x)


def plain(q: Array, k: Array, v: Array, dout: Array, dlse: Array, call: Dilated, dtype: str) -> Attention:
    """The same in ``dtype`` as one device computes it without any cleverness: rounded as ``oracle.plain`` does."""
    working = np.float64 if dtype == "float64" else np.float32
    return _attention((q, k, v, dout, dlse), call, working, rounding(dtype))


def patterns(call: Dilated, heads: int, queries: Array, keys: Array) -> Array:
    """int [heads, queries, keys]: how many patterns of a head hold both positions in one segment, at offsets that it keeps."""
    n, i, j = len(call.segments), queries[:, None], keys
    count = np.zeros((heads, len(queries), len(keys)), np.int8)
    for at, (segment, dilation) in enumerate(zip(call.segments, call.dilations, strict=True)):
        together = i // segment == j // segment
        for h in range(heads):
            if call.mixing == "softmax" or h * n // heads == at:
                kept_i, kept_j = (p % segment % dilation == h % dilation for p in (i, j))
                count[h] += together & kept_i & kept_j
    return count


def _attention(arrays: tuple[Array, ...], call: Dilated, dtype: Any, rounded: Callable[[Array], Array]) -> Attention:
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
        count = patterns(call, h, i, j)[None]
        lag = i[:, None] - j
        seen = (lag >= (-s if call.mask.lo is None else call.mask.lo)) & (lag <= (s if call.mask.hi is None else call.mask.hi))
        if call.key_mask is not None:
            seen = seen & call.key_mask[:, None, None, j]
        count = np.where(seen, count, 0)
        rows, keys = np.s_[:, :, i], np.s_[:, :, j]
        scores, steepness = (q[rows] @ k[keys].swapaxes(-1, -2)) * scale, 1.0
        if call.softcap is not None:
            bounded = np.tanh(scores / dtype(call.softcap))
            scores, steepness = dtype(call.softcap) * bounded, 1 - bounded * bounded
        scores = np.where(count > 0, scores, -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isneginf(top), 0, top).astype(dtype)
        p = count * np.exp(scores - top)
        total = p.sum(-1, keepdims=True)
        something = total > 0
        total = np.where(something, total, 1)
        p = p / total
        lse[rows] = np.where(something, np.log(total) + top, -np.inf)
        out[rows] = rounded(rounded(p) @ v[keys])
        delta = (dout[rows] * out[rows]).sum(-1, keepdims=True) - np.where(something, dlse[rows], 0)
        ds = rounded(p * (dout[rows] @ v[keys].swapaxes(-1, -2) - delta) * steepness)
        dq[rows] = (ds @ k[keys]) * scale
        dk[keys] += (ds.swapaxes(-1, -2) @ q[rows]) * scale
        dv[keys] += rounded(p).swapaxes(-1, -2) @ dout[rows]
    back = lambda x: rounded(np.moveaxis(x, 1, 2))
    of_kv = lambda x: rounded(np.moveaxis(x.reshape(b, h // share, share, s, -1).sum(2), 1, 2))
    return Attention(back(out), np.moveaxis(lse, 1, 2)[..., 0], back(dq), of_kv(dk), of_kv(dv))
