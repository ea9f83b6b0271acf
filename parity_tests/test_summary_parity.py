"""Summary attention: JAX = PyTorch on the same arrays, gradients included, float32 to 1e-6, norm of the difference over norm."""

from __future__ import annotations

import pytest

from ring_attn_core.reference.summary import SummaryAttended
from ring_attn_core.reference.tolerance import relative_error

pytest.importorskip("torch")

from .jax import test_summary as on_jax
from .support.selection import first
from .support.summaries import COMPILED
from .torch import test_summary as on_torch

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("case", first((case for case in COMPILED if case.dtype == "float32"), 2, 2), ids=str)
def test_frameworks_agree(gloo, case):
    ours, theirs = on_torch.run(gloo, case), on_jax.run(case)
    finite = lambda x: x[:, : case.length] if x.ndim > 3 or x.shape[1:2] != (case.kv_heads,) else x
    errors = {
        name: relative_error(finite(a), finite(b))
        for name, a, b in zip(SummaryAttended._fields, ours, theirs, strict=True)
        if a is not None and b is not None
    }
    assert max(errors.values()) <= 1e-6, errors
