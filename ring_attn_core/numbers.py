"""Checks of the plain numbers of a call, the same for ring_attention and for the layers."""

from __future__ import annotations

import math
from typing import Any

LEAST_CAP, LARGEST_CAP = 1e-18, 1e30
LARGEST_SCALE = 1e18
"""Beyond these a score divided by the cap may leave the normal numbers of float32."""


def check_scale(scale: Any) -> None:
    if scale is not None and not (_finite(scale) and abs(scale) <= LARGEST_SCALE):
        raise ValueError(
            f"scale must be a finite Python number of at most {LARGEST_SCALE:g}, or None (head_dim ** -0.5), got {scale!r}"
        )


def check_softcap(softcap: Any) -> None:
    if softcap is not None and not (_finite(softcap) and LEAST_CAP <= softcap <= LARGEST_CAP):
        raise ValueError(
            f"softcap must be a Python number above 0 ({LEAST_CAP:g} to {LARGEST_CAP:g}), got {softcap!r}: scores become "
            "softcap * tanh(score / softcap); pass None to leave them"
        )


def check_dropout_rate(rate: Any) -> None:
    if not (_finite(rate) and 0 <= rate < 1):
        raise ValueError(
            f"dropout_rate is the share of probabilities that are dropped, a Python number from 0 to below 1, got {rate!r}"
        )


def _finite(x: Any) -> bool:
    try:
        return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
    except OverflowError:  # an int beyond every float
        return False
