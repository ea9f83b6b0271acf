"""Error bounds of results, computed from the error of plain single-device attention on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .oracle import Attention

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-24, "bfloat16": 2.0**-24}
"""Half the distance from 1 to the next number in the dtype of the (out, lse) state, by the dtype of the inputs.

The state is float32, or float64 for float64 inputs.
"""


def relative_error(got: np.ndarray, exact: np.ndarray) -> float:
    """Return ||got - exact|| / ||exact|| over finite entries; inf if a NaN or infinity differs. The divisor is at least the norm
    of as many entries 0.01, because exact values may be (nearly) zero."""
    got, exact = np.asarray(got, np.longdouble), np.asarray(exact, np.longdouble)
    if got.shape != exact.shape:
        raise ValueError(f"compare arrays of one shape, got {got.shape} and {exact.shape}")
    finite = np.isfinite(exact)
    if not np.array_equal(got[~finite], exact[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return float("inf")
    got, exact = got[finite], exact[finite]
    floor = 0.01 * np.sqrt(max(exact.size, 1))
    norm = lambda x: np.sqrt(np.sum(x * x))
    return float(norm(got - exact) / max(norm(exact), floor))


def bound(plain: np.ndarray, exact: np.ndarray, dtype: str) -> float:
    """Return the allowed relative error: twice the error of ``plain``, plus two times UNIT_ROUNDOFF for ``dtype``."""
    return 2 * relative_error(plain, exact) + 2 * UNIT_ROUNDOFF[dtype]


def bound_of_sinks(plain: Attention, exact: Attention, arrays: Mapping[str, np.ndarray], dtype: str) -> float:
    """Return the allowed relative error of the gradient of sinks: with one number per head, ``plain`` may be accurate by chance.
    Take ``bound`` or, if larger, 5 standard deviations of a sum over queries whose errors, as in ``plain``, are independent."""
    assert plain.dsinks is not None and exact.dsinks is not None

    def terms(got: Attention) -> np.ndarray:
        sinks = arrays["sinks"].astype(got.lse.dtype)
        return np.exp(sinks - got.lse) * ((arrays["dout"] * got.out).sum(-1) - arrays["dlse"])

    wrong = np.stack([terms(plain) - terms(exact), terms(plain) * UNIT_ROUNDOFF[dtype]])
    sigma = np.linalg.norm(wrong.astype(np.float64).reshape(-1, len(arrays["sinks"])), axis=0)
    by_chance = relative_error(exact.dsinks + 5 * sigma, exact.dsinks)
    return max(bound(plain.dsinks, exact.dsinks, dtype), by_chance)
