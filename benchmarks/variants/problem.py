"""The trained models: small byte-level language models that differ only in their attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ring_attn_cli.demo.settings import read_standard_library

DIM, DEPTH, HEADS, KV_HEADS, HIDDEN = 64, 2, 4, 2, 192
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 2e-3, (0.9, 0.95), 1e-8, 0.01
"""The hyperparameters of AdamW in both frameworks."""

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "dilated": {"segments": (32, 64, 128, 256), "dilations": (1, 2, 4, 8)},
    "summary": {"block": 16, "summaries": 2, "window": 32},
}
"""The variant-specific arguments of each attention layer.

With 256 tokens, a token has on average 128 pairs in exact attention, 31 in dilated, and about 50 in summary attention, 12 of them
with summaries.
"""


class Problem(NamedTuple):
    """The settings of one run. ``tokens``: length of the sequence that each step trains on, which the ring shares."""

    variant: str
    steps: int
    tokens: int
    ranks: int


def batch(step: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels, int32 [1, tokens]: a random stretch of Python's standard library for each step."""
    text = np.frombuffer(read_standard_library(4_000_000), np.uint8)
    start = int(np.random.default_rng(step).integers(len(text) - tokens - 1))
    stretch = text[start : start + tokens + 1].astype(np.int32)
    return stretch[None, :-1], stretch[None, 1:]


def first_weights(like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Draw initial weights in the shapes of ``like``, seeded by their names, so that common weights are equal in all variants."""

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        deviation = 0.02 if name.startswith("embed") else 1.0 if name.endswith("pool") else shape[1] ** -0.5
        rng = np.random.default_rng(list(name.encode()))
        return (deviation * rng.standard_normal(shape)).astype(np.float32)

    return {name: drawn(name, x.shape) for name, x in like.items()}
