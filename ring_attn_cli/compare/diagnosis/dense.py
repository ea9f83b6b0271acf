"""Attention of a few queries with whole matrices, for hypotheses: with another scale, other key heads, fewer keys, by parts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ring_attn_core.dropout import kept, rescale
from ring_attn_core.reference.oracle import visible

from ..cases import Arrays, Case


class Forward(NamedTuple):
    """out [s h e] and lse [s h] of the queries; ``p`` [h s t] the probabilities, ``kept`` what dropout multiplies them by, and
    ``steepness`` the derivative of the softcapped scores."""

    out: np.ndarray
    lse: np.ndarray
    p: np.ndarray
    kept: np.ndarray
    steepness: np.ndarray


class Backward(NamedTuple):
    """A backward: how often rowsum(dout * out) and dlse count in it, and whether each shard of keys has its own out and lse."""

    delta: float = 1.0
    dlse: float = 1.0
    of_shards: bool = False


RIGHT = Backward()


class Dense:
    """The queries ``rows`` of batch row 0, of the first ``heads`` query heads, over all keys, in float64."""

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
        self.kept = np.ones(1)
        if case.dropout_rate:
            drawn = kept(case.seed, case.dropout_rate, 1, case.heads, rows, self.keys)[0, :heads]
            self.kept = drawn * rescale(case.dropout_rate)

    def forward(self, scale: float, seen: np.ndarray | None = None, reads: np.ndarray | None = None) -> Forward:
        """With this scale, where query head h reads key head ``reads[h]`` and queries see ``seen`` [s t], or as the case says."""
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
        return Forward(((p * self.kept) @ self.v[reads]).swapaxes(0, 1), lse.swapaxes(0, 1), p, self.kept, steepness)

    def parts(
        self, dout: np.ndarray, dlse: np.ndarray, of: np.ndarray, count: int, backward: Backward = RIGHT
    ) -> dict[str, np.ndarray]:
        """The gradients of row 0 by who gives them: {"dq": [count s h e], "dk", "dv": [count t d]}, summed over these heads.

        ``rows`` are all queries, and the heads those of key head 0. ``of`` [s]: the number of the part that a token belongs to.
        dq's parts come from keys, dk's and dv's from queries. ``backward``: the one whose gradients these are.
        """
        dout = dout[:, : self.heads].astype(np.float64).swapaxes(0, 1)
        dlse = dlse[:, : self.heads].astype(np.float64).swapaxes(0, 1) * backward.dlse
        members = [of == part for part in range(count)]
        k = self.k[self.reads]
        ds, dropped = np.zeros((2, *dout.shape[:2], k.shape[1]))
        for keys in members if backward.of_shards else [np.ones(k.shape[1], bool)]:
            forward = self.forward(self.case.factor, self.seen & keys)
            finite = np.isfinite(forward.lse.swapaxes(0, 1))
            delta = (dout * forward.out.swapaxes(0, 1)).sum(-1) * backward.delta - np.where(finite, dlse, 0)
            dp = dout @ self.v[self.reads].swapaxes(1, 2) * forward.kept
            ds += forward.p * (dp - delta[..., None]) * forward.steepness * self.case.factor
            dropped += forward.p * forward.kept
        dq = [(ds[:, :, at] @ k[:, at]).swapaxes(0, 1) for at in members]
        dk = [(ds[:, at].swapaxes(1, 2) @ self.q[:, at]).sum(0) for at in members]
        dv = [(dropped[:, at].swapaxes(1, 2) @ dout[:, at]).sum(0) for at in members]
        return {"dq": np.array(dq), "dk": np.array(dk), "dv": np.array(dv)}
