"""Rotary scalings: the frequencies and the attention factor that transformers computes, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ring_attn_core.model.rotary import (
    NTK,
    Linear,
    Llama3,
    Rotary,
    YaRN,
    attention_factor,
    inverse_frequencies,
    layer_rotaries,
    rotary_of,
)

from ..support.published import SCALINGS, recorded, their_frequencies

ROUNDING = 2e-6
"""transformers computes in float32: a power of a base of 500,000 is off by up to 13 roundings of its exponent."""


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor_are_those_recorded_from_transformers(name):
    head_dim, rotary, _ = SCALINGS[name]
    theirs = recorded()["scalings"][name]
    np.testing.assert_allclose(inverse_frequencies(rotary, head_dim), theirs["frequencies"], rtol=ROUNDING)
    assert attention_factor(rotary) == pytest.approx(theirs["attention_factor"], rel=1e-7)


@pytest.mark.parametrize("name", SCALINGS)
def test_the_record_is_what_transformers_computes(name):
    pytest.importorskip("transformers")
    frequencies, factor = their_frequencies(name)
    np.testing.assert_allclose(recorded()["scalings"][name]["frequencies"], frequencies, rtol=ROUNDING)
    assert recorded()["scalings"][name]["attention_factor"] == pytest.approx(factor, rel=1e-7)


@pytest.mark.parametrize("name", SCALINGS)
def test_an_array_of_pairs_gives_the_same_frequencies(name):
    head_dim, rotary, _ = SCALINGS[name]
    from_array = inverse_frequencies(rotary, head_dim, np.arange(head_dim // 2, dtype=np.float64))
    assert from_array.dtype == np.float64
    np.testing.assert_allclose(from_array, inverse_frequencies(rotary, head_dim), rtol=1e-12)


@pytest.mark.parametrize("scaling", [NTK(8.0), YaRN(8.0, 4096), Llama3(8.0, 1.0, 4.0, 4096)], ids=str)
def test_the_fastest_pair_keeps_its_frequency_and_the_slowest_is_divided_by_the_factor(scaling):
    plain, scaled = (inverse_frequencies(Rotary(1e6, x), 64) for x in (None, scaling))
    assert scaled[0] == pytest.approx(plain[0], rel=1e-12)
    assert scaled[-1] == pytest.approx(plain[-1] / 8, rel=1e-9)
    assert all(slower < faster for faster, slower in pairwise(scaled))


def test_yarns_ramp_ends_at_the_last_feature_where_no_pair_turns_so_slowly():
    """So does the authors' code: a base so small that the slowest pair turns more than once in the original context."""
    pair = np.arange(8)
    kept = 1 - (pair - 1).clip(0) / (15 - 1)
    expected = 10.0 ** (-pair / 8) * (kept + (1 - kept) / 8)
    np.testing.assert_allclose(inverse_frequencies(Rotary(10, YaRN(8.0, 4096, fast=400)), 16), expected, rtol=1e-12)


@pytest.mark.parametrize("scaling", [Linear(1.0), NTK(1), YaRN(1.0, 4096), Llama3(1.0, 1.0, 4.0, 4096)], ids=str)
def test_a_factor_of_1_changes_nothing(scaling):
    plain, scaled = (inverse_frequencies(Rotary(1e6, x), 64) for x in (None, scaling))
    np.testing.assert_allclose(scaled, plain, rtol=1e-15)
    assert attention_factor(Rotary(1e6, scaling)) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(1), "base of rotary embeddings must be greater than 1, got 1"),
        (lambda: Rotary("10000"), "base of rotary embeddings must be greater than 1, got '10000'"),  # type: ignore[arg-type]
        (lambda: Rotary(1e4, 8.0), r"must be Linear\(...\), NTK\(...\), YaRN\(...\), Llama3\(...\) or None, got 8.0"),  # type: ignore[arg-type]
        (lambda: Linear(0.5), "factor of Linear must be a number of at least 1, got 0.5"),
        (lambda: NTK(True), "factor of NTK must be a number of at least 1, got True"),
        (lambda: NTK(1e200), r"factor of NTK must be at most 1e\+30, got 1e\+200"),
        (lambda: YaRN(4.0, 4096, fast=1e308), r"fast of YaRN must be at most 1e\+30, got 1e\+308"),
        (lambda: YaRN(4.0, 4096.0), "original must be an int of at least 1, got 4096.0"),  # type: ignore[arg-type]
        (lambda: YaRN(4.0, 4096, fast=1.0), "fast=1.0 must be greater than slow=1.0"),
        (lambda: YaRN(4.0, 4096, mscale=1.0), "takes mscale and mscale_all together"),
        (lambda: Llama3(8.0, 4.0, 1.0, 8192), "high=1.0 must be greater than low=4.0"),
        (lambda: rotary_of(1e4, 1e4), r"rotary must be Rotary\(base, scaling\) or None, got 10000.0"),  # type: ignore[arg-type]
        (lambda: rotary_of(Rotary(1e6), 1e5), "rotary_base=100000.0 contradicts rotary=Rotary"),
        (lambda: rotary_of(Rotary(1e6), None), "rotary_base=None contradicts rotary=Rotary"),
        (lambda: layer_rotaries([1e4], 2), "one value for each of 2 layers"),
        (lambda: layer_rotaries([1e4, "far"], 2), "rotary must be Rotary.*, got 'far'"),  # type: ignore[arg-type]
    ],
)
def test_invalid_rotary_embeddings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
