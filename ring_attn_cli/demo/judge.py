"""What must hold, as plain numbers: whether the demo passes is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Check(NamedTuple):
    """``value`` may be at most ``bound``; NaN never is."""

    what: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.value <= self.bound

    def __str__(self) -> str:
        return f"{self.what}: {self.value:.2e}, must be at most {self.bound:.2e}"


def missed(checks: Iterable[Check]) -> list[Check]:
    """The checks that do not hold."""
    return [check for check in checks if not check.passed]


def exit_status(checks: Iterable[Check]) -> int:
    """0 where every check holds and there is one at all, else 1."""
    checks = list(checks)
    return 1 if missed(checks) or not checks else 0
