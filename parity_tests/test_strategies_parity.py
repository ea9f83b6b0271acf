"""JAX = PyTorch under every strategy, gradients included: float32 to 1e-6, norm of the difference over norm."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from .support.balanced import DIRECT_CASES
from .support.selection import first
from .support.strategies import EACH, ONE_EACH, PAIRS, SHARED
from .test_parity import agree

CASES = [replace(case, dtype="float32") for case in (*ONE_EACH, *SHARED, *EACH, *PAIRS)]


@pytest.mark.parametrize("case", first(dict.fromkeys(CASES), 0, 6), ids=str)
def test_frameworks_agree_under_every_strategy(gloo, case, record_property):
    record_property("worst", agree(gloo, case))


@pytest.mark.parametrize("case", first([case for case in DIRECT_CASES if case.dtype == "float32"], 0, 1), ids=str)
def test_frameworks_agree_on_needed_keys(gloo, case, record_property):
    record_property("worst", agree(gloo, case))
