"""How far a result is from another, and what it cost: relative norm, largest difference, units in the last place, bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ring_attn_core.reference.tolerance import relative_error

DIGITS = {"float64": (52, -1022), "float32": (23, -126), "float16": (10, -14), "bfloat16": (7, -126)}
"""Of a dtype: bits of the fraction, and the exponent of the least normal number."""

STATE = "lse", "dsinks", "loss"
"""Results that are float32 at least, whatever the dtype of the inputs."""


@dataclass(frozen=True)
class Quantity:
    """One array of a result beside the truth. ``bound``: the relative error that it may have.

    ``relative``: ||got - exact|| / ||exact||, of :func:`tolerance.relative_error`. ``largest``: max |got - exact|. ``ulps``: the
    largest difference of an entry in units of the last place that the exact entry has in the dtype. ``apart``: the relative
    difference from the same array of one device, and of the other framework; 0.0 where they are equal to the bit, None where
    there is no such result.
    """

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


def quantities(
    got: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray], bounds: Mapping[str, float], dtype: str
) -> list[Quantity]:
    """One of each array that both have; where the truth is of a part, of the first entries of what was got."""
    found = []
    for name, truth in exact.items():
        if name in got:
            kept = "float32" if name in STATE and dtype != "float64" else dtype
            mine = first(got[name], truth)
            largest, ulps = largest_difference(mine, truth), largest_ulps(mine, truth, kept)
            found.append(Quantity(name, relative_error(mine, truth), largest, ulps, bounds[name]))
    return found


def first(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The first entries of ``x`` along every dimension, as many as ``like`` has."""
    return x[tuple(slice(n) for n in like.shape)]


def largest_difference(got: np.ndarray, exact: np.ndarray) -> float:
    """max |got - exact|; 0 where both are the same infinity, inf where one is NaN or infinite and the other is not."""
    difference, _ = _differences(got, exact)
    return float(difference.max(initial=0))


def largest_ulps(got: np.ndarray, exact: np.ndarray, dtype: str) -> float:
    """The largest of |got - exact| / ulp in ``dtype``, the unit in the last place of the exact entry.

    An entry that is less than the root mean square of all has that one's ulp: where much cancels, as in the gradient of a query
    that sees one key, an entry has no last place of its own.
    """
    difference, exact = _differences(got, exact)
    fraction, least = DIGITS[dtype]
    finite = np.where(np.isfinite(exact), np.abs(exact), 0)
    usual = np.sqrt((finite * finite).mean()) if finite.size else np.longdouble(0)
    _, exponent = np.frexp(np.maximum(finite, usual))  # the entry = m 2^exponent with 1/2 <= m < 1
    ulp = np.ldexp(np.longdouble(1), np.maximum(exponent - 1, least) - fraction)
    return float((difference / ulp).max(initial=0))


def _differences(got: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|got - exact| entry by entry, and exact, both in extended precision."""
    got, exact = np.asarray(got, np.longdouble), np.asarray(exact, np.longdouble)
    finite = np.isfinite(got) & np.isfinite(exact)
    same = ~finite & (got == exact)
    difference = np.abs(np.where(finite, got, 0) - np.where(finite, exact, 0))
    return np.where(finite | same, difference, np.inf), exact


def apart(got: np.ndarray, other: np.ndarray) -> float:
    """The relative difference of two results, 0.0 exactly where they are equal to the bit."""
    if got.shape == other.shape and got.dtype == other.dtype and got.tobytes() == other.tobytes():
        return 0.0
    return max(relative_error(got, other), np.finfo(np.float64).tiny)


class ResidentMemory:
    """The peak of this process's resident memory above what was resident when this was made, in bytes.

    None where the system does not tell: on Linux, ``/proc`` does.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here: imports and inputs may have needed more
            self._before: int | None = _status("VmRSS")
        except (OSError, StopIteration):
            self._before = None

    def peak(self) -> int | None:
        return None if self._before is None else max(_status("VmHWM") - self._before, 0)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
