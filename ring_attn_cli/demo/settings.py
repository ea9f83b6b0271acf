"""The settings of the demo, and its training: the config and the text, the source of Python's standard library."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ring_attn_core import layouts
from ring_attn_core.masks import causal
from ring_attn_core.plan.ring import RingPlan

from ..processes import check_count
from ..train.config import Config, Data, Optimizer, RingConfig

QUICK: dict[str, Any] = {"tokens": 2048, "steps": 3}
FULL: dict[str, Any] = {"tokens": 16384, "steps": 12}
"""The values of ``--quick`` and of ``--full``, which replace the defaults."""
MODEL: dict[str, Any] = {"vocab": 256, "dim": 64, "depth": 2, "heads": 2, "kv_heads": 1, "hidden": 128, "tied": True}


@dataclass(frozen=True)
class DemoSettings:
    """The settings of the demo. ``tokens``: tokens of each sequence. ``steps``: training steps."""

    ranks: int = 4
    tokens: int = 4096
    steps: int = 6
    layout: str = "zigzag"

    @classmethod
    def make(cls, quick: bool, full: bool = False, **values: int | str | None) -> DemoSettings:
        """Return settings with the given values. Replace None by that of ``QUICK`` or ``FULL`` if asked for, else the default."""
        if quick and full:
            raise ValueError("--quick and --full exclude each other: pass one of them")
        chosen: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        return cls(**(QUICK if quick else FULL if full else {}) | chosen)

    def __post_init__(self) -> None:
        layouts.find_layout(self.layout)
        if self.ranks < 1:
            raise ValueError(f"a ring needs at least 1 rank, got --ranks {self.ranks}")
        check_count(self.ranks, "--ranks")
        if self.tokens < 2 * self.ranks:
            raise ValueError(f"--tokens {self.tokens} is less than two for each rank: pass at least {2 * self.ranks}")
        if self.steps < 2:
            raise ValueError(f"--steps {self.steps} cannot show that the loss falls: pass at least 2")

    @property
    def plan(self) -> RingPlan:
        seq_local = layouts.padded_local(self.layout, self.ranks, self.tokens)
        return RingPlan(self.layout, causal(), self.ranks, seq_local, length=self.tokens)

    @property
    def patience(self) -> float:
        """Return the seconds without a message after which the demo fails; above 16,384 tokens they grow with the square."""
        return 300 * max(1.0, (self.tokens / 16384) ** 2)

    @property
    def config(self) -> Config:
        """Return the training as a config of ``ring-attn train``, with a constant learning rate and without clipping."""
        return Config(
            steps=self.steps,
            model=MODEL,
            data=Data(length=self.plan.seq_local * self.ranks, batch_size=1),
            optimizer=Optimizer(learning_rate=3e-3, last_rate=1.0, warmup=0, decay=0.01, clip=math.inf),
            ring=RingConfig(ranks=self.ranks, layout=self.layout),
        )

    def batch(self, step: int) -> np.ndarray:
        """Return the bytes of a step's text, int32 [1, tokens]. The text continues the text of the previous step."""
        text = read_standard_library((step + 1) * self.tokens)[step * self.tokens :]
        return np.frombuffer(text, np.uint8).astype(np.int32)[None]


def read_standard_library(length: int) -> bytes:
    """Return the first bytes of the standard library's top-level modules by name, repeated if they are too short."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) < length:
            text += path.read_bytes()
    if not text:
        raise ValueError(f"the demo reads the source of Python's standard library, and {folder} has none: use another Python")
    return bytes(text * (length // len(text) + 1))[:length]
