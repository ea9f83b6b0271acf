"""Checks of the sizes, numbers and flags of a model."""

from __future__ import annotations

import sys
from typing import Any

from ..problem.checks import check_dropout_rate, check_softcap

DTYPES = ("float32", "bfloat16", "float16", "float64")

MAX_INT32 = 2**31 - 1
"""The largest allowed size, so that 64 bits can count the elements of a matrix of two such sizes."""

DEEPEST = 10_000
"""The largest number of layers. A config checks each layer, which takes time."""


def check_sizes(most: int = MAX_INT32, /, **sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {size!r}")
        if size > most:
            raise ValueError(f"{name} must be at most {most}, got {size}: pass a smaller one")


def check_flags(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")


def is_number(x: Any) -> bool:
    """Return whether ``x`` is an int or float, not a bool, in the range of finite floats."""
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def check_eps(eps: float) -> None:
    if not is_number(eps) or not 0 < eps < 1:
        raise ValueError(f"eps of RMSNorm must be a number above 0 and below 1, got {eps!r}: 1e-6 is usual, Llama has 1e-5")


def check_dtype(name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, by name or as the framework's own dtype, got {dtype!r}")


def check_scores(softcap: float | None, sinks: bool, alibi: bool, dropout_rate: float) -> None:
    check_softcap(softcap)
    check_dropout_rate(dropout_rate)
    for name, flag in (("sinks", sinks), ("alibi", alibi)):
        if not isinstance(flag, bool):
            raise ValueError(
                f"{name} must be True or False, got {flag!r}: the layer makes the numbers itself, one for every head"
            )


def head_sizes(dim: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """Return (kv_heads, head_dim), with None replaced by the defaults ``heads`` and ``dim / heads``."""
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


ACTIVATIONS = ("keep", "recompute", "offload")
"""The choices for the activations that a block stores for its backward.

With "keep" a block stores all activations. With "recompute" it stores only its input and attention's (out, lse), and the backward
computes the other activations again. With "offload" it stores the arrays of "recompute" in host memory.
"""


def check_activations(activations: str) -> None:
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")


def check_auto_shard(auto_shard: bool, mask: Any, **arguments: object) -> None:
    if not auto_shard and mask is not None:
        raise ValueError("mask is for whole sequences, with auto_shard=True: of shards pass key_mask, which shard_batch makes")
    for name, x in arguments.items():
        if auto_shard and x is not None:
            raise ValueError(f"{name} belongs to shards, and with auto_shard=True the model shards by itself: pass ids and mask")
