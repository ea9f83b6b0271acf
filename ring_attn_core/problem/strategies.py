"""How keys may travel: the names of the strategies, and why one is refused.

The strategies themselves are in ``ring/strategies/`` of both packages; CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from typing import Any

STRATEGIES = ("auto", "ring")


def check_strategy(strategy: Any) -> None:
    """ValueError for a strategy that does not exist."""
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")


def chosen(strategy: str) -> str:
    """Return the strategy that "auto" takes, or the one that was asked for."""
    return "ring" if strategy == "auto" else strategy
