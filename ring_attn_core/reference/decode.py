"""Reference decoding in numpy: attention of a few queries over a cache whose tokens are stored in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .oracle import Array, rounding


class DecodeFeatures(NamedTuple):
    """The optional arguments of ``tree_attention_decode`` that change scores or visibility.

    ``tree_mask``: bool [batch, queries, queries]; [b, i, j] is True if query i sees query j. ``window``: number of positions
    before its own that a query sees. ``sinks``, ``alibi_slopes``: [heads]. ``k_scale``, ``v_scale``: [kv_heads], factors of k, v.
    """

    tree_mask: Array | None = None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None


def exact(q: Array, k: Array, v: Array, q_positions: Array, k_positions: Array, **features: Any) -> tuple[Array, Array]:
    """Return (out, lse) over the global cache in float64, or in ``np.longdouble`` if q is float64.
    Shapes: q [b n h d], k [b t g d], v [b t g e], out [b n h e], lse [b n h], ``q_positions`` [b n], ``k_positions`` [b t],
    negative for an empty slot. ``features``: see DecodeFeatures."""
    working = np.longdouble if q.dtype.itemsize >= 8 else np.float64
    return _attention((q, k, v), (q_positions, k_positions), DecodeFeatures(**features), working, lambda x: x)


def plain(
    q: Array, k: Array, v: Array, q_positions: Array, k_positions: Array, dtype: str, **features: Any
) -> tuple[Array, Array]:
    """Compute ``exact`` with the rounding of plain single-device attention in ``dtype``: probabilities and out once each.
    Sums and softmax are in float32 (in float64 for "float64")."""
    working = np.float64 if dtype == "float64" else np.float32
    return _attention((q, k, v), (q_positions, k_positions), DecodeFeatures(**features), working, rounding(dtype))


def visible(q_positions: Array, k_positions: Array, tree_mask: Array | None, window: int | None) -> tuple[Array, Array]:
    """Return [batch, queries, slots]: whether the query sees the slot (bool), and the lag, query position minus key position.
    With ``tree_mask``, bool [batch, queries, queries], queries are nodes of a tree: a node's position is that of node 0 plus its
    depth, the number of other nodes that it sees."""
    i, j = (x.astype(np.int64) for x in (q_positions[:, :, None], k_positions[:, None, :]))
    if tree_mask is None:
        lag, seen = i - j, (j >= 0) & (j <= i)
    else:
        n = tree_mask.shape[1]
        base, depth = i[:, :1], tree_mask.sum(-1) - 1
        node = j - base
        inside = (node >= 0) & (node < n)
        rows = np.broadcast_to(np.clip(node, 0, max(n - 1, 0)), (*node.shape[:1], n, node.shape[2]))
        among = np.take_along_axis(tree_mask, rows, 2)
        key_depth = np.take_along_axis(np.broadcast_to(depth[:, None, :], tree_mask.shape), rows, 2)
        lag = base + depth[:, :, None] - np.where(inside, base + key_depth, j)
        seen = ((j >= 0) & (node < 0)) | (inside & among)
    return seen if window is None else seen & (lag <= window), lag


def _attention(
    arrays: tuple[Array, Array, Array],
    positions: tuple[Array, Array],
    features: DecodeFeatures,
    dtype: Any,
    rounded: Callable[[Array], Array],
) -> tuple[Array, Array]:
    q, k, v = arrays
    b, n, h, d = q.shape
    t, g, e = v.shape[1:]
    seen, lag = visible(*positions, features.tree_mask, features.window)
    read = seen.any(1)[:, :, None, None]
    per_kv = lambda x: dtype(1) if x is None else x.astype(dtype)[:, None]
    k, v = (np.where(read, x, 0).astype(dtype) * per_kv(scale) for x, scale in ((k, features.k_scale), (v, features.v_scale)))
    grouped = np.moveaxis(q.astype(dtype).reshape(b, n, g, h // g, d), 1, 3)  # [b g r n d]
    scores = grouped @ np.moveaxis(k, 1, 3)[:, :, None] * dtype(d**-0.5 if features.scale is None else features.scale)
    if features.softcap is not None:
        scores = dtype(features.softcap) * np.tanh(scores / dtype(features.softcap))
    if features.alibi_slopes is not None:
        slopes = features.alibi_slopes.astype(dtype).reshape(g, h // g, 1, 1)
        scores = scores - slopes * lag[:, None, None].astype(dtype)
    scores = np.where(seen[:, None, None], scores, -np.inf)
    none = np.full(h, -np.inf) if features.sinks is None else features.sinks
    sink = none.astype(dtype).reshape(g, h // g, 1, 1)
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), 0, top).astype(dtype)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True) + np.exp(sink - top)
    something = total > 0
    total = np.where(something, total, 1)
    out = rounded(rounded(p / total) @ np.moveaxis(v, 1, 2)[:, :, None])
    lse = np.where(something, np.log(total) + top, -np.inf)
    whole = lambda x: np.moveaxis(x, 3, 1).reshape(b, n, h, x.shape[-1])
    return whole(out), whole(lse)[..., 0]
