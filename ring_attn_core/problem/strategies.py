"""The names of the strategies by which keys travel, and their check.

The strategies themselves are in ``ring/strategies/`` of both packages; CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from typing import Any

STRATEGIES = ("auto", "ring")


def check_strategy(strategy: Any) -> None:
    """Raise ValueError if the strategy is unknown."""
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")


def chosen(strategy: str) -> str:
    """Resolve "auto" to the strategy that it stands for; return any other name unchanged."""
    return "ring" if strategy == "auto" else strategy
