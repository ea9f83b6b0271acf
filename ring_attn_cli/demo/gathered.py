"""The results that the processes of the demo have reported so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..processes import Message
from . import exactness, training
from .exactness import PARTS, CheckRow, DemoResult, DemoTruth
from .judge import Check
from .training import DemoStep

EXACT = "exact"
"""The name of the group of processes that computes exact attention; the other groups are named by their framework."""


@dataclass
class Gathered:
    """The results so far.
    ``truth``: exact attention, by key head. ``steps``: training steps, by framework. ``results``: by part (a key of ``PARTS``)
    and framework. ``rows``: checks, filled once ``truth`` and ``results`` are complete."""

    frameworks: list[str]
    truth: dict[int, DemoTruth] = field(default_factory=dict)
    results: dict[str, dict[str, DemoResult]] = field(default_factory=lambda: {part: {} for part in PARTS})
    steps: dict[str, list[DemoStep]] = field(default_factory=dict)
    rows: list[CheckRow] = field(default_factory=list)

    def take(self, message: Message) -> bool:
        """Store the data of a message. Return True if it completes ``rows``."""
        if message.kind == "truth":
            kv_head, self.truth[kv_head] = message.data
        elif message.kind == "step":
            self.steps.setdefault(message.crew, []).append(message.data)
        elif message.kind in PARTS:
            self.results[message.kind][message.crew] = message.data
        missing = len(self.truth) < exactness.KV_HEADS or any(len(of) < len(self.frameworks) for of in self.results.values())
        if self.rows or missing:
            return False
        ring, alone = ({name: self.results[part][name].attention for name in self.frameworks} for part in PARTS)
        self.rows = exactness.rows(exactness.joined(self.truth), ring, alone)
        return True

    @property
    def losses(self) -> dict[str, list[float]]:
        return {name: [step.loss for step in self.steps[name]] for name in self.frameworks}

    @property
    def checks(self) -> list[Check]:
        return [*(check for row in self.rows for check in row.checks), *training.checks(self.losses)]
