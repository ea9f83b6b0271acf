"""The results of the demo and their bounds: each is a plain number that must not exceed another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..compare.comparison import Comparison, VariantResult
from ..compare.variants import TITLES

CLOSE = 1e-6
"""Bound of the relative difference of two float32 results: of two frameworks, or of a ring and one device."""
FALL = 0.99
"""Bound of the last loss divided by the first."""


class Check(NamedTuple):
    """A check that ``value`` is at most ``bound``; NaN fails."""

    what: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.value <= self.bound

    def __str__(self) -> str:
        return f"{self.what}: {self.value:.2e}, must be at most {self.bound:.2e}"


@dataclass(frozen=True)
class Results:
    """The comparison of attention, and the loss of each training step, by framework."""

    comparison: Comparison
    losses: dict[str, list[float]] = field(default_factory=dict)

    @property
    def checks(self) -> list[Check]:
        return [*check_attention(self.comparison.results), *check_losses(self.losses)]


def check_attention(results: tuple[VariantResult, ...]) -> list[Check]:
    """Return the checks of each array: against exact attention, of a ring against one device, and of the two frameworks."""
    found = []
    for result in results:
        title, kind = TITLES[result.framework], "ring" if result.ranks > 1 else "one device"
        for each in result.quantities:
            name = f"{each.name}: {title} {kind} against"
            found.append(Check(f"{name} exact float64", each.relative, each.bound))
            if each.from_one_device is not None:
                found.append(Check(f"{name} one device", each.from_one_device, CLOSE))
            if each.from_other_framework is not None and result.framework == "torch":
                found.append(Check(f"{name} JAX {kind}", each.from_other_framework, CLOSE))
    return found


def find_difference(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def loss_bound(steps: int) -> float:
    """Return the allowed relative difference, at most 0.1, of two frameworks' losses after ``steps`` steps.
    Rounding errors grow: the difference was 3e-7 after 12 steps of 16,384 tokens, and grew tenfold every 50 of 200 steps of 512
    tokens."""
    return min(1e-5 * 10 ** (steps // 50), 0.1)


def check_losses(losses: dict[str, list[float]]) -> list[Check]:
    """Return the checks that the loss falls in each framework and, if there are two, that their losses agree at every step."""
    found = [Check(f"{name} loss: last over first", each[-1] / each[0], FALL) for name, each in losses.items()]
    if len(losses) == 2:
        (first, a), (second, b) = losses.items()
        differences = [find_difference(x, y) for x, y in zip(a, b, strict=True)]
        largest = next((each for each in differences if each != each), max(differences))  # NaN is no maximum
        found.append(Check(f"loss: {first} against {second}, at the worst step", largest, loss_bound(len(a))))
    return found


def find_missed(checks: list[Check]) -> list[Check]:
    return [check for check in checks if not check.passed]


def exit_status(checks: list[Check]) -> int:
    return 1 if find_missed(checks) or not checks else 0
