"""What the sizes, numbers and flags of a model must be."""

from __future__ import annotations

import sys
from typing import Any

from ..problem.checks import check_dropout_rate, check_softcap

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""What weights may be kept in, and what may be computed in."""

LARGEST = 2**31 - 1
"""The largest size: a matrix of two such has numbers that 64 bits still count."""

DEEPEST = 10_000
"""The most layers, for each is looked at when a config is made."""


def check_sizes(most: int = LARGEST, /, **sizes: int) -> None:
    """ValueError for a size that is no int from 1 to ``most``."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {size!r}")
        if size > most:
            raise ValueError(f"{name} must be at most {most}, got {size}: pass a smaller one")


def check_flags(**flags: bool) -> None:
    """ValueError for a flag that is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")


def is_number(x: Any) -> bool:
    """Whether ``x`` is an int or float that a finite float can hold; no bool."""
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def check_eps(eps: float) -> None:
    """ValueError for an eps of RMSNorm that is no positive number."""
    if not is_number(eps) or not 0 < eps < 1:
        raise ValueError(f"eps of RMSNorm must be a number above 0 and below 1, got {eps!r}: 1e-6 is usual, Llama has 1e-5")


def check_dtype(name: str, dtype: str) -> None:
    """ValueError for what is not the name of a floating dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, by name or as the framework's own dtype, got {dtype!r}")


def check_scores(softcap: float | None, sinks: bool, alibi: bool, dropout_rate: float) -> None:
    """ValueError for numbers outside their range: where the layer is made, and not only at its first call."""
    check_softcap(softcap)
    check_dropout_rate(dropout_rate)
    for name, flag in (("sinks", sinks), ("alibi", alibi)):
        if not isinstance(flag, bool):
            raise ValueError(
                f"{name} must be True or False, got {flag!r}: the layer makes the numbers itself, one for every head"
            )


def head_sizes(dim: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """(kv_heads, head_dim), where None means as many as query heads and ``dim / heads``.

    Raises ValueError where heads do not divide ``dim`` and no head_dim is given, and where kv_heads do not divide heads.
    """
    check_sizes(dim=dim, heads=heads)
    if head_dim is None:
        if dim % heads:
            raise ValueError(
                f"dim={dim} cannot be split over heads={heads}: choose a number of heads that divides dim, or pass head_dim, "
                "which need not be dim / heads"
            )
        head_dim = dim // heads
    kv_heads = heads if kv_heads is None else kv_heads
    check_sizes(kv_heads=kv_heads, head_dim=head_dim)
    check_sizes(**{"heads * head_dim": heads * head_dim})
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}: choose a divisor, 1 for multi-query attention")
    return kv_heads, head_dim
