"""The training part of the demo: one small transformer with the same initial weights, optimizer and text in both frameworks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..processes import Report
from ..train.config import Config, Data, Optimizer, RingConfig
from ..train.side import TrainStep
from .judge import Check
from .settings import DemoSettings
from .text import VOCAB, standard_library

MODEL: dict[str, Any] = {"vocab": VOCAB, "dim": 64, "depth": 2, "heads": 2, "kv_heads": 1, "hidden": 128, "tied": True}

FALL = 0.99
"""The demo passes if the last loss divided by the first is at most this."""


class DemoStep(NamedTuple):
    loss: float
    seconds: float


def batch(step: int, tokens: int) -> np.ndarray:
    """Return the byte values of a step's text, int32 [1, tokens]. The text continues the text of the previous step."""
    text = standard_library((step + 1) * tokens)[step * tokens :]
    return np.frombuffer(text, np.uint8).astype(np.int32)[None]


def config(settings: DemoSettings) -> Config:
    """Return the demo's training as a config of ``ring-attn train``, with a constant learning rate and without clipping."""
    plan = settings.plan
    return Config(
        steps=settings.steps,
        model=MODEL,
        data=Data(length=plan.seq_local * plan.ranks, batch_size=1),
        optimizer=Optimizer(learning_rate=3e-3, last_rate=1.0, warmup=0, decay=0.01, clip=math.inf),
        ring=RingConfig(ranks=settings.ranks, layout=settings.layout),
    )


def train(report: Report, settings: DemoSettings, step: Callable[[int, np.ndarray], TrainStep]) -> None:
    """Train on consecutive stretches of text, one for each step, and report each loss. ``step(number, text)`` trains one step."""
    for number in range(settings.steps):
        began = time.perf_counter()
        done = step(number, batch(number, settings.tokens))
        report("step", DemoStep(done.loss, time.perf_counter() - began))


def difference(a: float, b: float) -> float:
    """Return the relative difference of two losses, ``|a - b| / |b|``."""
    return abs(a - b) / abs(b)


def close(steps: int) -> float:
    """Return the allowed relative difference, at most 0.1, of two frameworks' losses after ``steps`` steps.
    Rounding errors grow: the difference was 3e-7 after 12 steps of 16,384 tokens, and grew tenfold every 50 of 200 steps of 512
    tokens."""
    return min(1e-5 * 10 ** (steps // 50), 0.1)


def checks(losses: Mapping[str, list[float]]) -> list[Check]:
    """Return the checks that the loss falls in each framework and, if there are two, that their losses agree at every step."""
    found = [Check(f"{name} loss: last over first", each[-1] / each[0], FALL) for name, each in losses.items()]
    if len(losses) == 2:
        (first, a), (second, b) = losses.items()
        largest = float(np.max([difference(x, y) for x, y in zip(a, b, strict=True)]))
        found.append(Check(f"loss: {first} against {second}, at the worst step", largest, close(len(a))))
    return found
