"""Tests of the function that the suites for JAX call: it is jax.nn.dot_product_attention, on one device and over a ring."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from parity_tests.outside import in_jax
from parity_tests.outside.one import SETTINGS


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_arrays_over_the_devices_give_what_jax_gives(monkeypatch: pytest.MonkeyPatch, ranks: int):
    monkeypatch.setattr(SETTINGS, "ranks", ranks)
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 13, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    before = SETTINGS.calls
    found = in_jax.attend(q, k, v, is_causal=True)
    np.testing.assert_allclose(found, jax.nn.dot_product_attention(q, k, v, is_causal=True), rtol=0, atol=2e-6)
    soft = in_jax.attend(q, k, v, softcap=2.0)
    scores = 2 * jax.numpy.tanh(jax.numpy.einsum("bshd,bthd->bhst", q, k.repeat(2, 2)) * 8**-0.5 / 2)
    exact = jax.numpy.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v.repeat(2, 2))
    np.testing.assert_allclose(soft, exact, rtol=0, atol=2e-6)
    assert SETTINGS.calls == before + 2
