"""Cases with large, nearly equal scores: a float32 lse alone is too coarse to weigh the shards of keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ring_attn_core import causal, full
from ring_attn_core.reference.oracle import Attention
from ring_attn_core.reference.tolerance import UNIT_ROUNDOFF, relative_error

from .cases import Case

TOKENS = 64
SIZES = {"1e4": 1e4, "1e6": 1e6}
CLOSE = {"float32": 1e-6, "float64": 2e-15}
"""The largest relative error of out and of the gradients. In float32 lse alone gives 7e-5 at 1e4 and 1.4 % at 1e6."""


def large(size: float, ranks: int, spread: bool = False, **fields: object) -> Case:
    """Return a case of equal scores ``size``; with ``spread`` they differ by multiples of a quarter, which float32 holds exactly.

    Each product q . k is exact, so all errors come from the softmax and from the sums over the keys. Sinks are as large.
    """
    case = Case(**{"mask": full(), "ranks": ranks, "length": TOKENS, "scale": 1.0, "tiles": (16, 8)} | fields)  # type: ignore[arg-type]
    rng = np.random.default_rng(case.data)
    q, k = np.zeros_like(case.arrays["q"]), np.zeros_like(case.arrays["k"])
    q[..., 0], k[..., 0] = size, 1
    if spread:
        q[..., 1], k[..., 1] = rng.integers(-2, 3, q.shape[:3]) / 2, rng.integers(-2, 3, k.shape[:3]) / 2
    sinks = {"sinks": np.round(case.features["sinks"]) + q.dtype.type(size)} if case.sinks else {}
    return case.given(q=q, k=k, **sinks)


def features_of(size: float, ranks: int) -> Case:
    """Return a case of large scores with masks, sinks and dropout, in which some queries see no key of some shards."""
    features = {"extents": "documents", "key_mask": "random", "sinks": True, "dropout_rate": 0.25}
    return large(size, ranks, True, mask=causal(), layout="contiguous", poison=True, **features)


def check_exact(case: Case, got: Attention) -> dict[str, float]:
    """Assert that out and the gradients are within ``CLOSE`` of float64, and lse within its own rounding. Return the errors."""
    errors = {}
    for name, mine, truth in zip(Attention._fields, got, case.expected, strict=True):
        if mine is not None and truth is not None:
            errors[name] = relative_error(mine if name == "dsinks" else mine[:, : case.length], truth)
            allowed = UNIT_ROUNDOFF[case.dtype] if name == "lse" else CLOSE[case.dtype]
            assert errors[name] <= allowed, f"{name}: error {errors[name]:.3g} against float64, allowed {allowed:.3g} ({case})"
    return errors


def check_no_ring_adds_errors(errors: list[dict[str, float]], ranks: Sequence[int]) -> None:
    """Assert that the errors of a ring are at most twice those on one rank, plus the roundings of its merges.

    ``errors``: by result, for each number of ``ranks``; the first is 1.
    A ring of n merges n - 1 times, and the errors of n roundings add up to about sqrt(n) of one; two are allowed at least.
    """
    alone, *others = errors
    for n, other in zip(ranks[1:], others, strict=True):
        for name, error in other.items():
            assert error <= 2 * alone[name] + max(2, n**0.5) * UNIT_ROUNDOFF["float32"], (name, errors)
