"""The public dropout mask: that of the reference, and that by which attention drops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ring_attn_core.dropout import WORD, keep_mask, rescale

HOW: dict[str, Any] = {"batch": 2, "heads": 3, "dropout_rate": 0.3, "dropout_seed": -5}


def mask_of(framework: Any, *positions: Any, **how: Any) -> np.ndarray:
    return np.asarray(framework.compiled(lambda: framework.dropout_mask(*positions, **HOW | how))())


@pytest.mark.parametrize("offset", [(4, 1), (WORD, WORD), (WORD - 1, 0)])
def test_it_is_the_reference_at_any_positions_and_offset(framework, offset):
    """Batch rows and heads are counted modulo 2 to the 32."""
    q, k = [3, 2**31 - 1, 8, 0, 17], np.array([40, 1, 9, 2**20, 2, 33, 8])
    got = mask_of(framework, q, k, dropout_offset=offset)
    assert got.dtype == np.bool_
    np.testing.assert_array_equal(got, keep_mask(-5, 0.3, 2, 3, q, k, offset))
    assert mask_of(framework, q, k, dropout_rate=0.0).all()


def test_attention_drops_what_it_says(framework):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 21, heads, 4)).astype(np.float32) for heads in (3, 1, 1))
    scores = np.einsum("bshd,btgd->bhst", q.astype(np.float64), k) / 2
    p = np.exp(np.where(np.tri(21, dtype=bool), scores, -np.inf))
    p *= mask_of(framework, range(21), range(21)) * rescale(0.3) / p.sum(-1, keepdims=True)
    options: dict[str, Any] = {"dropout_rate": 0.3, "dropout_seed": -5, "layout": "contiguous"}
    got = framework.alone("ring_attention")(*map(framework.array, (q, k, v)), **options)
    np.testing.assert_allclose(np.asarray(got), np.einsum("bhst,btgd->bshd", p, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dropout_rate": 1.0}, "dropout_rate is the share of probabilities that are dropped"),
        ({"dropout_seed": 0.5}, "dropout_seed must be an int"),
        ({"heads": 0}, "heads must be an int of at least 1, got 0"),
        ({"batch": True}, "batch must be an int of at least 1, got True"),
        ({"k_positions": [[1, 2]]}, "q_positions and k_positions must be 1-D, a position for each token, got 1 and 2"),
    ],
)
def test_invalid_rates_seeds_sizes_and_positions_are_refused(framework, changes, words):
    arguments = {"q_positions": [0, 1], "k_positions": [0, 1]} | HOW | changes
    with pytest.raises(ValueError, match=words):
        framework.dropout_mask(arguments.pop("q_positions"), arguments.pop("k_positions"), **arguments)
