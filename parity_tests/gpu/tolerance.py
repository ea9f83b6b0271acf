"""The tolerance of results of the GPU kernels: as anywhere, but for the lse of Hopper's kernels."""

from __future__ import annotations

import numpy as np

from ring_attn_core.kernels.hopper.supports import refusal_of_shape

from ..support.cases import Case, computed_bound

TANH = 1.2e-5
"""The relative error of a tanh by Hopper's special function unit."""

DROPPED = 2.0**-25
"""The mean relative error of a score for each 16 features: tensor cores drop the bits of a sum that float32 cannot hold.

They do not round. With heads of 256 and three tokens the lse was wrong by 2.26e-7. A sum in float64 that drops bits after each 8
or 16 features is wrong by 2.5e-7 or 2.0e-7, in the same numbers (correlation 0.96 and 0.97); with rounding, by 0.6e-7 or 0.8e-7.
"""


def bound_on_hopper(case: Case, name: str) -> float:
    """Return the bound of an array: out and the gradients keep theirs, the lse may be as wrong as the scores."""
    allowed = computed_bound(case, name)
    if name == "lse" and refusal_of_shape(case.dtype, case.head_dim, case.v_dim) is None:
        allowed += DROPPED * case.head_dim / 16
        if case.softcap is not None:
            lse = case.expected.lse
            allowed += TANH * case.softcap / max(0.01, np.sqrt(np.mean(np.square(lse[np.isfinite(lse)]))))
    return allowed
