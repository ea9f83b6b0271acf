"""The record of a sampling: what it refuses, and the numbers that frameworks compute with."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ring_attn_core.sampling import Sampling


def brief(number: float) -> str:
    return str(number)[:8]


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1.0, 1e300, 10**400], ids=brief)
def test_float32_and_int32_hold_every_number_of_a_choice_and_none_becomes_0(temperature):
    parameters = Sampling(temperature, top_k=2**70, top_p=1e-300).parameters
    with np.errstate(all="raise"):
        numbers = np.float32(parameters.temperature), np.float32(1 / parameters.temperature), np.float32(parameters.top_p)
    assert all(math.isfinite(x) and x > 0 for x in numbers)
    assert np.int32(parameters.top_k) == 2**31 - 1


@pytest.mark.parametrize("kept", [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 1, "top_p": 1}], ids=str)
def test_at_temperature_0_nothing_is_drawn_so_top_k_and_top_p_are_refused(kept):
    with pytest.raises(ValueError, match=r"have no effect on it: set a temperature above 0, or leave them out"):
        Sampling(**kept)
    Sampling(5e-324, **kept)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -1, -(10**400), 10**400], ids=brief)
def test_an_invalid_share_or_temperature_is_refused(number):
    with pytest.raises(ValueError, match="top_p must be a number above 0"):
        Sampling(1.0, top_p=number)
    if number != 10**400:
        with pytest.raises(ValueError, match="temperature must be a number of at least 0"):
            Sampling(number)
