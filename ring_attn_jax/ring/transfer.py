"""Transfers between the ranks of a ring: one ppermute."""

from __future__ import annotations

from typing import TypeVar

from jax import lax

T = TypeVar("T")


def send(x: T, hop: int, axis: str, ranks: int) -> T:
    """Send ``x``, an array or a tree of arrays, ``hop`` ranks onward; return that of the rank ``hop`` before this one."""
    return lax.ppermute(x, axis, [(rank, (rank + hop) % ranks) for rank in range(ranks)])
