"""The public dropout mask: that of the reference, and that by which attention drops, in both frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import ring_attn_jax  # noqa: E402
import ring_attn_torch  # noqa: E402
from ring_attn_core.dropout import keep_mask, rescale  # noqa: E402

PACKAGES = pytest.mark.parametrize("package", [ring_attn_jax, ring_attn_torch], ids=["jax", "torch"])
HOW: dict[str, Any] = {"batch": 2, "heads": 3, "dropout_rate": 0.3, "dropout_seed": -5}


def mask_of(package: Any, *positions: Any, **how: Any) -> np.ndarray:
    """Return the dropout mask; in JAX by one program, not one for each operation."""
    make = lambda: package.dropout_mask(*positions, **HOW | how)
    return np.asarray((jax.jit(make) if package is ring_attn_jax else make)())


@PACKAGES
def test_it_is_the_reference_at_any_positions_and_offset(package: Any):
    q, k = [3, 2**31 - 1, 8, 0, 17], np.array([40, 1, 9, 2**20, 2, 33, 8])
    got = mask_of(package, q, k, dropout_offset=(4, 1))
    assert got.dtype == np.bool_
    np.testing.assert_array_equal(got, keep_mask(-5, 0.3, 2, 3, q, k, (4, 1)))
    assert mask_of(package, q, k, dropout_rate=0.0).all()


@PACKAGES
def test_attention_drops_what_it_says(package: Any):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 21, heads, 4)).astype(np.float32) for heads in (3, 1, 1))
    scores = np.einsum("bshd,btgd->bhst", q.astype(np.float64), k) / 2
    p = np.exp(np.where(np.tri(21, dtype=bool), scores, -np.inf))
    p *= mask_of(package, range(21), range(21)) * rescale(0.3) / p.sum(-1, keepdims=True)
    make = jax.numpy.asarray if package is ring_attn_jax else torch.from_numpy
    options: dict[str, Any] = {"dropout_rate": 0.3, "dropout_seed": -5, "layout": "contiguous"}
    if package is ring_attn_jax:
        mesh = jax.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
        got = ring_attn_jax.sharded_ring_attention(*map(make, (q, k, v)), mesh=mesh, **options)
    else:
        got = ring_attn_torch.ring_attention(*map(make, (q, k, v)), **options)
    np.testing.assert_allclose(np.asarray(got), np.einsum("bhst,btgd->bshd", p, v), rtol=1e-5, atol=1e-5)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"dropout_rate": 1.0}, "dropout_rate is the share of probabilities that are dropped"),
    "seed": ({"dropout_seed": 0.5}, "dropout_seed must be an int"),
    "heads": ({"heads": 0}, "heads must be an int of at least 1, got 0"),
    "batch": ({"batch": True}, "batch must be an int of at least 1, got True"),
    "positions": ({"k_positions": [[1, 2]]}, "q_positions and k_positions must be 1-D, a position for each token, got 1 and 2"),
}


@PACKAGES
@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(package: Any, changes: dict[str, Any], words: str):
    arguments = {"q_positions": [0, 1], "k_positions": [0, 1]} | HOW | changes
    with pytest.raises(ValueError, match=words):
        package.dropout_mask(arguments.pop("q_positions"), arguments.pop("k_positions"), **arguments)
