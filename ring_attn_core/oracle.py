"""The truth and the yardstick, in numpy: exact attention in float64, and plain single-device attention in a given dtype.

Both take whole arrays in the natural order of tokens and know nothing of rings, layouts or tiles. ``plain`` is what one device
computes in the same dtype without any cleverness: products in the dtype, sums and softmax in float32, probabilities and results
rounded once. numpy is needed here, and only here and in the tolerance, the demo and the pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .runs import Band

Array = np.ndarray


class Attention(NamedTuple):
    """out [b s h e], lse [b s h] (natural log) and the gradients of q, k and v under the cotangents."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array


def exact(
    q: Array, k: Array, v: Array, mask: Band, dout: Array, dlse: Array | None = None, scale: float | None = None
) -> Attention:
    """Attention and gradients in float64 (of float64 arrays: in extended precision).

    q [b s h d], k [b t g d], v [b t g e]; query head h reads kv head h // (heads / kv_heads).

    s_ij = scale q_i . k_j where the mask lets i see j; lse_i = log sum_j exp s_ij; out_i = sum_j exp(s_ij - lse_i) v_j.
    A query that sees nothing: out 0, lse -inf, zero gradients.
    """
    working = np.longdouble if q.dtype == np.float64 else np.float64
    return _attention(q, k, v, mask, dout, dlse, scale, working, lambda x: x)


def plain(
    q: Array, k: Array, v: Array, mask: Band, dout: Array, dtype: str, dlse: Array | None = None, scale: float | None = None
) -> Attention:
    """The same in ``dtype`` ("float32", "bfloat16", "float16" or "float64") as one device computes it; see the module's text."""
    working = np.float64 if dtype == "float64" else np.float32
    return _attention(q, k, v, mask, dout, dlse, scale, working, rounding(dtype))


def rounding(dtype: str) -> Callable[[Array], Array]:
    """The function that rounds a float32 array to ``dtype`` and gives it back as float32 (float64: unchanged)."""
    if dtype == "bfloat16":
        return _to_bfloat16
    if dtype == "float16":
        return lambda x: x.astype(np.float16).astype(np.float32)
    return lambda x: x


def _to_bfloat16(x: Array) -> Array:
    """Round to nearest, ties to even, on the upper 16 bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x).astype(np.float32)


def _attention(q, k, v, mask, dout, dlse, scale, dtype, rounded, block=512) -> Attention:  # type: ignore[no-untyped-def]
    b, s, h, d = q.shape
    t, g, e = v.shape[1:]
    scale = d**-0.5 if scale is None else scale
    # [b g r s d]: the query heads of one kv head side by side
    grouped = lambda x: np.moveaxis(x.astype(dtype).reshape(b, s, g, h // g, -1), 1, 3)
    q_, dout_ = grouped(q), grouped(dout)
    dlse_ = grouped(np.zeros((b, s, h)) if dlse is None else dlse)
    k_, v_ = (np.moveaxis(x.astype(dtype), 1, 2)[:, :, None] for x in (k, v))
    out, lse, dq = np.zeros_like(dout_), np.full_like(dlse_, -np.inf), np.zeros_like(q_)
    dk, dv = np.zeros_like(k_), np.zeros_like(v_)
    for i0 in range(0, s, block):
        i1 = min(i0 + block, s)
        j0 = 0 if mask.hi is None else min(max(i0 - mask.hi, 0), t)
        j1 = t if mask.lo is None else min(max(i1 - mask.lo, j0), t)
        if j0 == j1:
            continue
        lag = np.arange(i0, i1)[:, None] - np.arange(j0, j1)[None, :]
        visible = (lag >= (-s - t if mask.lo is None else mask.lo)) & (lag <= (s + t if mask.hi is None else mask.hi))
        rows, keys = np.s_[..., i0:i1, :], np.s_[..., j0:j1, :]
        scores = np.where(visible, (q_[rows] @ k_[keys].swapaxes(-1, -2)) * dtype(scale), -np.inf)
        top = scores.max(-1, keepdims=True)
        top = np.where(np.isneginf(top), 0, top).astype(dtype)
        p = np.exp(scores - top)
        total = p.sum(-1, keepdims=True)
        seen = total > 0
        p = p / np.where(seen, total, 1)
        lse[rows] = np.where(seen, np.log(np.where(seen, total, 1)) + top, -np.inf)
        out[rows] = rounded(rounded(p) @ v_[keys])
        delta = (dout_[rows] * out[rows]).sum(-1, keepdims=True) - np.where(seen, dlse_[rows], 0)
        ds = rounded(p * (dout_[rows] @ v_[keys].swapaxes(-1, -2) - delta))
        dq[rows] = (ds @ k_[keys]) * dtype(scale)
        dk[keys] += ((ds.swapaxes(-1, -2) @ q_[rows]) * dtype(scale)).sum(2, keepdims=True)
        dv[keys] += (rounded(p).swapaxes(-1, -2) @ dout_[rows]).sum(2, keepdims=True)
    whole = lambda x: np.moveaxis(x, 3, 1).reshape(b, s, h, -1)
    back = lambda x: rounded(np.moveaxis(x[:, :, 0], 2, 1))
    return Attention(whole(out), whole(lse)[..., 0], rounded(whole(dq)), back(dk), back(dv))
