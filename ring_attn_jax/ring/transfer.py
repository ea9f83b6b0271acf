"""Arrays on their way: one ppermute."""

from __future__ import annotations

from typing import TypeVar

from jax import lax

T = TypeVar("T")


def send(x: T, hop: int, axis: str, ranks: int) -> T:
    """What the rank ``hop`` before this one holds, while this rank's goes to the one ``hop`` after: an array, or several."""
    return lax.ppermute(x, axis, [(rank, (rank + hop) % ranks) for rank in range(ranks)])
