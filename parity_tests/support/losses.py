"""Hidden states, a head and labels in numpy, and their cross-entropy with its gradients in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from .models import Arrays

BATCH, LENGTH, DIM, VOCAB = 2, 40, 12, 31
CHUNKS = (1, 7, 32, 4096)
"""Chunk sizes for 80 tokens: single tokens, a shorter last chunk, equal chunks, and one chunk of all."""

LEFT_OUT = 0.3
"""The fraction of labels that are ignored."""


def hidden_states(dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hidden [b s dim], head [vocab dim] and labels int32 [b s]; all labels of the first stretch are ignored."""
    rng = np.random.default_rng(11)
    hidden, head = rng.standard_normal((BATCH, LENGTH, DIM)).astype(dtype), rng.standard_normal((VOCAB, DIM)).astype(dtype)
    labels = rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    labels[rng.random(labels.shape) < LEFT_OUT] = -100
    labels[:, : LENGTH // 4] = -100
    return hidden, head, labels


def exact_loss(
    hidden: np.ndarray, head: np.ndarray, labels: np.ndarray, reduction: str = "mean", weights: np.ndarray | None = None
) -> Arrays:
    """Return the loss, dhidden, dhead and dlogits in float64; ``weights`` [b s] of the labels, None: 1."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    logits, kept = hidden @ head.T, labels != -100
    chosen = np.arange(head.shape[0]) == labels[..., None]
    lse = np.log(np.exp(logits).sum(-1))
    factor = np.where(kept, 1.0 if weights is None else weights, 0)
    factor = factor / factor.sum() if reduction == "mean" else factor
    dlogits = (np.exp(logits - lse[..., None]) - chosen) * factor[..., None]
    value = (factor * (lse - (logits * chosen).sum(-1))).sum()
    return {
        "loss": np.asarray(value),
        "dhidden": dlogits @ head,
        "dhead": np.einsum("bsv,bsd->vd", dlogits, hidden),
        "dlogits": dlogits,
    }


def exact_log_probs(hidden: np.ndarray, head: np.ndarray, labels: np.ndarray, dlogp: np.ndarray, dh: np.ndarray) -> Arrays:
    """Return the log-probabilities and entropies, dhidden, dhead and dlogits for these cotangents in float64."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    logits, kept = hidden @ head.T, labels != -100
    chosen = np.arange(head.shape[0]) == labels[..., None]
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(every)
    entropy = -(p * every).sum(-1) * kept
    dlogits = dlogp[..., None] * (chosen - p) - dh[..., None] * p * (every + entropy[..., None])
    dlogits *= kept[..., None]
    return {
        "logp": (every * chosen).sum(-1),
        "entropy": entropy,
        "dhidden": dlogits @ head,
        "dhead": np.einsum("bsv,bsd->vd", dlogits, hidden),
        "dlogits": dlogits,
    }


def cotangents_of_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Return a cotangent of each token's log-probability and entropy [b s]."""
    dlogp, dh = np.random.default_rng(3).standard_normal((2, BATCH, LENGTH))
    return dlogp, dh
