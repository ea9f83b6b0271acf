"""JAX = PyTorch on the same arrays and plan, gradients included: float32 to 1e-6, norm of the difference over norm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ring_attn_core.reference.oracle import Attention
from ring_attn_core.reference.tolerance import relative_error

pytest.importorskip("torch")

from .jax import ring as on_jax
from .support.cases import CHOSEN, REST, SPECIAL, Case
from .support.combinations import COMBINATIONS
from .support.selection import first, one_in
from .torch import ring as on_torch

FLOAT32 = [case for case in CHOSEN if case.dtype == "float32"]


@pytest.mark.parametrize("case", first(sorted(FLOAT32, key=lambda case: case.ranks == 8), 1, 3), ids=str)
def test_frameworks_agree(gloo, case, record_property):
    record_property("worst", agree(gloo, case))


@pytest.mark.parametrize("case", [each for each in one_in(2, SPECIAL) if each.values[0].dtype == "float32"], ids=str)
def test_frameworks_agree_on_cross_attention_padding_and_odd_sizes(gloo, case, record_property):
    record_property("worst", agree(gloo, case, quick=False))


@pytest.mark.parametrize("case", [each for each in first(COMBINATIONS, 0, 5) if each.values[0].dtype == "float32"], ids=str)
def test_frameworks_agree_on_features_together(gloo, case, record_property):
    """Those that the tests of the ring have computed in either framework."""
    record_property("worst", agree(gloo, case))


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in COMBINATIONS if case.dtype != "float32"], ids=str)
def test_frameworks_agree_on_any_two_features_together(gloo, case, record_property):
    record_property("worst", agree(gloo, replace(case, dtype="float32")))


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case.dtype == "float32"], ids=str)
def test_frameworks_agree_on_the_rest_of_the_grid(gloo, case, record_property):
    record_property("worst", agree(gloo, case))


def agree(gloo, case: Case, **arguments) -> float:
    ours, theirs = on_torch.run(gloo, case), on_jax.run(case, **arguments)
    named = zip(Attention._fields, ours, theirs, strict=True)
    errors = {name: relative_error(a, b) for name, a, b in named if a is not None and b is not None}
    assert len(errors) == 5 + case.sinks - case.values_in_keys
    assert max(errors.values()) <= 1e-6, errors
    return max(errors.values())
