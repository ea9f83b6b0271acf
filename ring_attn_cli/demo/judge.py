"""The pass criterion of the demo: checks of plain numbers against bounds, and the exit status that follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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


def missed(checks: Iterable[Check]) -> list[Check]:
    """Return the checks that fail."""
    return [check for check in checks if not check.passed]


def exit_status(checks: Iterable[Check]) -> int:
    """Return 0 if there is at least one check and all of them pass, else 1."""
    checks = list(checks)
    return 1 if missed(checks) or not checks else 0
