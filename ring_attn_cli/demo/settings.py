"""The settings of one run of the demo, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ring_attn_core import layouts
from ring_attn_core.masks import causal
from ring_attn_core.plan.ring import RingPlan

from ..processes import check_count

MASK = causal()
QUICK: dict[str, Any] = {"tokens": 2048, "steps": 3}
"""The values of ``--quick``, which replace the defaults."""


@dataclass(frozen=True)
class DemoSettings:
    """The settings of the demo. ``tokens``: tokens of each sequence. ``steps``: training steps."""

    ranks: int = 4
    tokens: int = 8192
    steps: int = 6
    layout: str = "zigzag"

    @classmethod
    def of(cls, quick: bool, **values: int | str | None) -> DemoSettings:
        """Return settings with the given values. Replace None by the default; if ``quick``, ``QUICK`` overrides the defaults."""
        chosen: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        return cls(**(QUICK if quick else {}) | chosen)

    def __post_init__(self) -> None:
        layouts.named(self.layout)
        if self.ranks < 1:
            raise ValueError(f"a ring needs at least 1 rank, got --ranks {self.ranks}")
        check_count(self.ranks, "--ranks")
        if self.tokens < 2 * self.ranks:
            raise ValueError(f"--tokens {self.tokens} is less than two for each rank: pass at least {2 * self.ranks}")
        if self.steps < 2:
            raise ValueError(f"--steps {self.steps} cannot show that the loss falls: pass at least 2")

    @property
    def plan(self) -> RingPlan:
        """Return the plan of the demo's ring."""
        seq_local = layouts.padded_local(self.layout, self.ranks, self.tokens)
        return RingPlan(self.layout, MASK, self.ranks, seq_local, length=self.tokens)

    @property
    def patience(self) -> float:
        """Return the seconds without a message after which the demo fails; above 16,384 tokens they grow with the square."""
        return 300 * max(1.0, (self.tokens / 16384) ** 2)
