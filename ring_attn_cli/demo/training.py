"""Do both frameworks learn alike? One small transformer, its weights, its optimizer and its text, the same for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .judge import Check
from .text import VOCAB, standard_library

MODEL: dict[str, Any] = {"vocab": VOCAB, "dim": 64, "depth": 2, "heads": 2, "kv_heads": 1, "hidden": 128, "tied": True}
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.01
"""Of AdamW in both frameworks."""

FALL = 0.99
"""What may be left of the first loss at the last step."""


class Step(NamedTuple):
    loss: float
    seconds: float


def batch(step: int, tokens: int) -> np.ndarray:
    """int32 [1, tokens]: the stretch of text that follows that of the step before."""
    text = standard_library((step + 1) * tokens)[step * tokens :]
    return np.frombuffer(text, np.uint8).astype(np.int32)[None]


def weights(like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """First weights in the shapes of ``like``, drawn with a fixed seed in the order of their names."""
    rng = np.random.default_rng(0)

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        deviation = 0.02 if name.startswith("embed") else shape[1] ** -0.5
        return deviation * rng.standard_normal(shape, np.float32)

    return {name: drawn(name, like[name].shape) for name in sorted(like)}


def difference(a: float, b: float) -> float:
    """Of two losses, relatively."""
    return abs(a - b) / abs(b)


def close(steps: int) -> float:
    """How far apart the losses of two frameworks may be at any of ``steps``, relatively; at most a tenth.

    Training carries every rounding on and adds to it: 3e-7 in 12 steps of 16,384 tokens; in 200 of 512 it grew tenfold every 50.
    """
    return min(1e-5 * 10 ** (steps // 50), 0.1)


def checks(losses: Mapping[str, list[float]]) -> list[Check]:
    """That the loss falls in every framework, and that two frameworks agree at every step."""
    found = [Check(f"{name} loss: last over first", each[-1] / each[0], FALL) for name, each in losses.items()]
    if len(losses) == 2:
        (first, a), (second, b) = losses.items()
        largest = float(np.max([difference(x, y) for x, y in zip(a, b, strict=True)]))
        found.append(Check(f"loss: {first} against {second}, at the worst step", largest, close(len(a))))
    return found
