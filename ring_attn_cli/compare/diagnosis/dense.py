"""Attention of batch row 0 with dense float64 matrices, recomputed under the mistake that a hypothesis assumes.

The forward can take another scale, another mask, or another key head for each query head. The backward computes
ds = p * (dp - delta) with delta = rowsum(dout * out) - dlse. It can multiply either term of delta by a wrong factor, or use the
softmax of each key shard alone. It returns each gradient as summands, one for each group of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ring_attn_core.dropout import keep_mask, rescale
from ring_attn_core.reference.oracle import visible

from ..cases import Arrays, Case


class Forward(NamedTuple):
    """The forward of s queries over t keys in h heads: ``out`` [s h e], ``lse`` [s h], ``p`` [h s t] before dropout.
    ``dropout_factor`` multiplies ``p``. ``steepness``: softcap's derivative at each score. Both broadcast to ``p``."""

    out: np.ndarray
    lse: np.ndarray
    p: np.ndarray
    dropout_factor: np.ndarray
    steepness: np.ndarray


class Backward(NamedTuple):
    """A variant of the backward, by default the correct one.
    ``delta``, ``dlse``: factors of rowsum(dout * out) and of dlse in delta, 1 if correct. ``of_shards``: each shard of keys uses
    its own ``out`` and lse."""

    delta: float = 1.0
    dlse: float = 1.0
    of_shards: bool = False


RIGHT = Backward()


class Dense:
    """Attention of batch row 0 in float64: the queries at positions ``rows``, all keys, and the first ``heads`` query heads."""

    def __init__(self, case: Case, arrays: Arrays, rows: range, heads: int) -> None:
        self.case, self.rows, self.heads = case, rows, heads
        self.keys = range(case.length)
        self.q = arrays["q"][0, rows.start : rows.stop, :heads].astype(np.float64).swapaxes(0, 1)
        self.k, self.v = (arrays[name][0].astype(np.float64).swapaxes(0, 1) for name in "kv")
        self.reads = np.arange(heads) // (case.heads // case.kv_heads)
        self.seen = visible(
            case.band, rows, self.keys, *(arrays[n][:1] if n in arrays else None for n in ("extents", "key_mask"))
        )[0]
        self.sinks = arrays["sinks"][:heads].astype(np.float64) if "sinks" in arrays else np.full(heads, -np.inf)
        slopes = arrays["alibi_slopes"][:heads] if "alibi_slopes" in arrays else np.zeros(heads)
        self.bias = slopes[:, None, None] * (np.arange(case.length) - np.array(rows)[:, None])
        self.dropout_factor = np.ones(1)
        if case.dropout_rate:
            drawn = keep_mask(case.seed, case.dropout_rate, 1, case.heads, rows, self.keys)[0, :heads]
            self.dropout_factor = drawn * rescale(case.dropout_rate)

    def forward(self, scale: float, seen: np.ndarray | None = None, reads: np.ndarray | None = None) -> Forward:
        """Return the forward of the queries with q . k multiplied by ``scale``; None below means the case's.
        ``seen``: the mask, bool [queries, keys]. ``reads``: the key head of each query head."""
        reads = self.reads if reads is None else reads
        scores, steepness = scale * (self.q @ self.k[reads].swapaxes(1, 2)), np.ones(1)
        if self.case.softcap is not None:
            bounded = np.tanh(scores / self.case.softcap)
            scores, steepness = self.case.softcap * bounded, 1 - bounded * bounded
        scores = np.where(self.seen if seen is None else seen, scores + self.bias, -np.inf)
        sinks = self.sinks[:, None, None]
        top = np.maximum(scores.max(-1, keepdims=True), sinks)
        top = np.where(np.isneginf(top), 0, top)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True) + np.exp(sinks - top)
        something = total > 0
        p = weights / np.where(something, total, 1)
        lse = np.where(something, np.log(np.where(something, total, 1)) + top, -np.inf)[..., 0]
        return Forward(
            ((p * self.dropout_factor) @ self.v[reads]).swapaxes(0, 1), lse.swapaxes(0, 1), p, self.dropout_factor, steepness
        )

    def parts(
        self, dout: np.ndarray, dlse: np.ndarray, of: np.ndarray, count: int, backward: Backward = RIGHT
    ) -> dict[str, np.ndarray]:
        """Return the gradients of batch row 0 as ``count`` summands, one for each group of tokens, such as a rank's shard.
        ``of`` [s]: groups, of keys for dq and of queries for dk and dv. "dq" [count s h d], "dk" [count t d] and "dv" [count t e]
        are summed over query heads. Needs all queries, and exactly the query heads that read key head 0."""
        dout = dout[:, : self.heads].astype(np.float64).swapaxes(0, 1)
        dlse = dlse[:, : self.heads].astype(np.float64).swapaxes(0, 1) * backward.dlse
        members = [of == part for part in range(count)]
        k = self.k[self.reads]
        ds, dropped = np.zeros((2, *dout.shape[:2], k.shape[1]))
        for keys in members if backward.of_shards else [np.ones(k.shape[1], bool)]:
            forward = self.forward(self.case.factor, self.seen & keys)
            finite = np.isfinite(forward.lse.swapaxes(0, 1))
            delta = (dout * forward.out.swapaxes(0, 1)).sum(-1) * backward.delta - np.where(finite, dlse, 0)
            dp = dout @ self.v[self.reads].swapaxes(1, 2) * forward.dropout_factor
            ds += forward.p * (dp - delta[..., None]) * forward.steepness * self.case.factor
            dropped += forward.p * forward.dropout_factor
        dq = [(ds[:, :, at] @ k[:, at]).swapaxes(0, 1) for at in members]
        dk = [(ds[:, at].swapaxes(1, 2) @ self.q[:, at]).sum(0) for at in members]
        dv = [(dropped[:, at].swapaxes(1, 2) @ dout[:, at]).sum(0) for at in members]
        return {"dq": np.array(dq), "dk": np.array(dk), "dv": np.array(dv)}
