"""How wrong a result of the GPU kernels may be: as anywhere, but for the lse under softcap by Hopper's kernels."""

from __future__ import annotations

import numpy as np

from ring_attn_core.kernels.hopper.supports import refusal_of_shape

from ..support.cases import Case, computed_bound

TANH = 1.2e-5
"""The relative error of a tanh by Hopper's special function unit."""


def bound_on_hopper(case: Case, name: str) -> float:
    """A score is wrong by TANH softcap at most, and so is the lse; out and the gradients keep the bound that they had."""
    allowed = computed_bound(case, name)
    if name == "lse" and case.softcap is not None and refusal_of_shape(case.dtype, case.head_dim, case.v_dim) is None:
        lse = case.expected.lse
        allowed += TANH * case.softcap / max(0.01, np.sqrt(np.mean(np.square(lse[np.isfinite(lse)]))))
    return allowed
