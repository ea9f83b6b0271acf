"""Dilated attention in JAX and in PyTorch gives the same numbers, to 1e-6 in float32 on a CPU."""

from __future__ import annotations

import pytest

from ring_attn_core.reference.tolerance import relative_error

from .jax import dilated as on_jax
from .jax.test_dilated import IN_CI
from .support.dilated import CASES, by_name
from .torch import dilated as on_torch


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == IN_CI[0] else pytest.mark.exhaustive if case in IN_CI else pytest.mark.full)
        for case in CASES
        if case.dtype == "float32"
    ],
    ids=str,
)
def test_both_frameworks_give_the_same(gloo, case):
    ours, theirs = on_jax.run(case), on_torch.run(gloo, case)
    for name, x in by_name(ours).items():
        assert relative_error(x, by_name(theirs)[name]) <= 1e-6, name
