"""What is trained: one small language model of bytes, the same but for its attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ring_attn_cli.demo.text import standard_library

DIM, DEPTH, HEADS, KV_HEADS, HIDDEN = 64, 2, 4, 2, 192
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 2e-3, (0.9, 0.95), 1e-8, 0.01
"""Of AdamW in both frameworks."""

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "dilated": {"segments": (32, 64, 128, 256), "dilations": (1, 2, 4, 8)},
    "summary": {"block": 16, "summaries": 2, "window": 32},
}
"""The arguments of each variant's layer besides those that all have. Of 256 tokens one has 128 pairs on the average in exact
attention, 31 in dilated, and some 50 in summary attention, 12 of them with summaries."""


class Recipe(NamedTuple):
    """``tokens`` of a context, which the ring shares, one context a step."""

    variant: str
    steps: int
    tokens: int
    ranks: int


def batch(step: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and labels int32 [1, tokens]: a stretch of Python's standard library, somewhere else at every step."""
    text = np.frombuffer(standard_library(4_000_000), np.uint8)
    start = int(np.random.default_rng(step).integers(len(text) - tokens - 1))
    stretch = text[start : start + tokens + 1].astype(np.int32)
    return stretch[None, :-1], stretch[None, 1:]


def first_weights(like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """First weights in the shapes of ``like``, drawn from a seed of their name: what variants have in common starts the same."""

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        deviation = 0.02 if name.startswith("embed") else 1.0 if name.endswith("pool") else shape[1] ** -0.5
        rng = np.random.default_rng(list(name.encode()))
        return (deviation * rng.standard_normal(shape)).astype(np.float32)

    return {name: drawn(name, x.shape) for name, x in like.items()}
