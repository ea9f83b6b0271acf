"""The error of a result: relative norm, largest difference, units in the last place, bitwise equality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ring_attn_core.reference.tolerance import relative_error

DIGITS = {"float64": (52, -1022), "float32": (23, -126), "float16": (10, -14), "bfloat16": (7, -126)}
"""Fraction bits of each dtype, and the exponent of its smallest normal number."""

Arrays = Mapping[str, np.ndarray]

STATE = "lse", "dsinks", "loss"
"""Results that are computed in at least float32, whatever the dtype of the inputs."""


@dataclass(frozen=True)
class Quantity:
    """The error of one result array, ``got``, against the ``exact`` array; ``bound`` is the largest allowed ``relative``.
    ``largest``: max abs(got - exact). ``from_one_device``, ``from_other_framework``: relative difference from the same array
    there; 0.0 if both are bitwise equal, None if it is missing."""

    name: str
    relative: float
    largest: float
    ulps: float
    bound: float
    from_one_device: float | None = None
    from_other_framework: float | None = None

    @property
    def within(self) -> bool:
        return self.relative <= self.bound


def measure(
    got: Arrays, exact: Arrays, bounds: Mapping[str, float], dtype: str, alone: Arrays | None = None, other: Arrays | None = None
) -> list[Quantity]:
    """Return a Quantity for each array in both; ``exact`` may cover leading rows and heads only, and these are compared."""
    found = []
    for name, truth in exact.items():
        if name in got:
            kept = "float32" if name in STATE and dtype != "float64" else dtype
            mine = first(got[name], truth)
            sizes = relative_error(mine, truth), largest_difference(mine, truth), largest_ulps(mine, truth, kept)
            beside = (None if x is None or name not in x else apart(got[name], x[name]) for x in (alone, other))
            found.append(Quantity(name, *sizes, bounds[name], *beside))
    return found


def first(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return the leading part of ``x`` that has the shape of ``like``."""
    return x[tuple(slice(n) for n in like.shape)]


def largest_difference(got: np.ndarray, exact: np.ndarray) -> float:
    """Return max |got - exact|. Two equal infinities differ by 0; with any other NaN or infinity the result is inf."""
    difference, _ = _differences(got, exact)
    return float(difference.max(initial=0))


def largest_ulps(got: np.ndarray, exact: np.ndarray, dtype: str) -> float:
    """Return the largest |got - exact| / ulp, with the ulp of the exact entry or, if larger, of the root mean square.
    Cancellation can leave a small entry with the rounding error of large terms."""
    difference, exact = _differences(got, exact)
    fraction, least = DIGITS[dtype]
    finite = np.where(np.isfinite(exact), np.abs(exact), 0)
    usual = np.sqrt((finite * finite).mean()) if finite.size else np.longdouble(0)
    _, exponent = np.frexp(np.maximum(finite, usual))  # the entry = m 2^exponent with 1/2 <= m < 1
    ulp = np.ldexp(np.longdouble(1), np.maximum(exponent - 1, least) - fraction)
    return float((difference / ulp).max(initial=0))


def _differences(got: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return |got - exact| and exact in long double; equal infinities differ by 0, any other NaN or infinity by inf."""
    got, exact = np.asarray(got, np.longdouble), np.asarray(exact, np.longdouble)
    finite = np.isfinite(got) & np.isfinite(exact)
    same = ~finite & (got == exact)
    difference = np.abs(np.where(finite, got, 0) - np.where(finite, exact, 0))
    return np.where(finite | same, difference, np.inf), exact


def apart(got: np.ndarray, other: np.ndarray) -> float:
    """Return the relative difference of two results. It is exactly 0.0 only if their dtypes, shapes and bits are equal."""
    if got.shape == other.shape and got.dtype == other.dtype and got.tobytes() == other.tobytes():
        return 0.0
    return max(relative_error(got, other), np.finfo(np.float64).tiny)
