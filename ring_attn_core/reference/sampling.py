"""Reference sampling in numpy, one token at a time. Both frameworks must sample the same tokens, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dropout import WORD, seed_words
from ..sampling import Sampling, words


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the probability of each token, float64 [vocab], after temperature, top-k and top-p."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")
    if not sampling.temperature:
        return (np.arange(len(logits)) == order[0]).astype(float)
    p = np.exp((logits - logits.max()) / sampling.temperature)
    if sampling.top_k is not None:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    if sampling.top_p is not None:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


def gumbel(vocab: int, seed: int, request: int, position: int) -> np.ndarray:
    """Return Gumbel noise, float64 [vocab], from 32 random bits for each token; seed, request and position determine the bits."""

    def multiply(a: Any, constant: int) -> tuple[Any, Any]:
        product = a * np.uint64(constant)
        return product >> np.uint64(32), product & np.uint64(WORD)

    wide = lambda x: np.asarray(x, np.uint64)
    low, high = map(wide, seed_words(seed))
    bits = words((low, high), wide(request), wide(position), np.arange(vocab, dtype=np.uint64), (multiply, np.uint64))
    return -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-32))


def sample(logits: np.ndarray, sampling: Sampling, request: int, position: int) -> int:
    """Return the token sampled from logits [vocab] at ``position`` of a request."""
    p = probabilities(logits, sampling)
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(p) + gumbel(len(p), sampling.seed, request, position)))
