"""Cases of tokamax's own tests, the small ones, with ours in the place of theirs; docs/suites.md says what becomes of all."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from parity_tests.outside.one import SETTINGS

PASS = "test_small_sequences2", "test_causal_mask_q_indices"
REFUSED = {
    "test_bias5": "bias would have to travel round the ring",
    "test_mask0": "mask differs between heads",
    "test_dropout": "no argument 'dropout_rate'",
}


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> Any:
    if find_spec("tokamax") is None:
        pytest.skip("tokamax is not installed")
    request.config.addinivalue_line("markers", "long: a mark of tokamax's tests")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("parity_tests.outside.tokamax_suite").AttentionTest


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(SETTINGS, "ranks", request.param)
    monkeypatch.setattr(SETTINGS, "calls", 0)
    return request.param


@pytest.mark.parametrize("case", PASS)
def test_ours_passes_cases_of_tokamax(case: str, ranks: int, suite: Any):
    suite(case).debug()
    assert SETTINGS.calls


@pytest.mark.parametrize(("case", "words"), REFUSED.items(), ids=REFUSED)
def test_ours_refuses_cases_of_tokamax_by_name(case: str, words: str, ranks: int, suite: Any):
    with pytest.raises((ValueError, TypeError), match=words):
        suite(case).debug()
