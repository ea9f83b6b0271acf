"""The oracle against the definition, query by query, and against finite differences: each feature alone, and all at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ring_attn_core import Band, causal, full, sliding_window
from ring_attn_core.dropout import keep_mask
from ring_attn_core.reference.oracle import Attention, exact, plain
from ring_attn_core.reference.tolerance import relative_error

B, S, T, H, G, D, E = 2, 7, 9, 4, 2, 3, 2
RNG = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "q": RNG.standard_normal((B, S, H, D)),
    "k": RNG.standard_normal((B, T, G, D)),
    "v": RNG.standard_normal((B, T, G, E)),
    "dout": RNG.standard_normal((B, S, H, E)),
    "dlse": RNG.standard_normal((B, S, H)),
}
MASKS = {"full": full(), "causal": causal(1), "lopsided": sliding_window(2, 1, offset=1)}
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "scale": {"scale": 0.3},
    "extents": {"extents": np.sort(RNG.integers(0, T + 1, (B, S, 2)), -1).astype(np.int32)},
    "key_extents": {"key_extents": np.sort(RNG.integers(0, S + 1, (B, T, 2)), -1).astype(np.int32)},
    "key_mask": {"key_mask": RNG.random((B, T)) < 0.6},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": RNG.standard_normal(H)},
    "alibi": {"alibi_slopes": RNG.standard_normal(H)},
    "dropout": {"dropout_rate": 0.4, "dropout_seed": 7},
}
FEATURES["all"] = {name: value for features in FEATURES.values() for name, value in features.items()}
FEATURES["a row without keys, sinks"] = FEATURES["sinks"] | {"key_mask": np.arange(B)[:, None] > np.zeros(T)}
FEATURES["a row without keys"] = {"key_mask": np.arange(B)[:, None] > np.zeros(T)}


def by_definition(q, k, v, mask: Band, scale=D**-0.5, **features) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, one (query, key) pair after the other, in Python's floats."""
    extents, of_keys, key_mask, sinks = (features.get(name) for name in ("extents", "key_extents", "key_mask", "sinks"))
    cap, slopes, rate = features.get("softcap"), features.get("alibi_slopes"), features.get("dropout_rate", 0.0)
    rate = round(rate * 2**16) / 2**16
    keeps = keep_mask(features["dropout_seed"], rate, B, H, range(S), range(T)) if rate else np.ones((B, H, S, T), bool)
    out, lse = np.zeros((B, S, H, E)), np.full((B, S, H), -np.inf)
    for b, i, h in np.ndindex(B, S, H):
        weights = {}
        for j in range(T):
            inside = extents is None or extents[b, i, 0] <= j < extents[b, i, 1]
            inside &= of_keys is None or of_keys[b, j, 0] <= i < of_keys[b, j, 1]
            if mask.sees(i, j) and inside and (key_mask is None or key_mask[b, j]):
                score = scale * float(q[b, i, h] @ k[b, j, h // (H // G)])
                score = score if cap is None else cap * math.tanh(score / cap)
                weights[j] = math.exp(score + (0 if slopes is None else slopes[h] * (j - i)))
        total = sum(weights.values()) + (0 if sinks is None else math.exp(sinks[h]))
        if total:
            lse[b, i, h] = math.log(total)
            out[b, i, h] = sum(w / total * keeps[b, h, i, j] / (1 - rate) * v[b, j, h // (H // G)] for j, w in weights.items())
    return out, lse


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_out_and_lse_are_the_definition(mask, features):
    got = exact(mask=mask, **ARRAYS, **features)
    out, lse = by_definition(ARRAYS["q"], ARRAYS["k"], ARRAYS["v"], mask, **features)
    np.testing.assert_allclose(got.out.astype(float), out, rtol=0, atol=1e-14)
    np.testing.assert_allclose(got.lse.astype(float), lse, rtol=0, atol=1e-14)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradients_are_finite_differences(mask, features):
    """Along one random direction an input, in extended precision, with the error of fourth order in the step."""
    given: dict[str, Any] = ARRAYS | features
    inputs = {name: given[name] for name in ("q", "k", "v", "sinks") if name in given}
    fixed = {name: x for name, x in given.items() if name not in inputs}

    def loss(name: str, direction: np.ndarray, step: float) -> np.longdouble:
        got = exact(mask=mask, **fixed, **inputs | {name: inputs[name] + np.longdouble(step) * direction})
        seen = np.isfinite(got.lse)
        return (got.out * ARRAYS["dout"]).sum() + (got.lse[seen] * ARRAYS["dlse"][seen]).sum()

    gradients = exact(mask=mask, **fixed, **inputs)._asdict()
    for name in inputs:
        direction = np.random.default_rng(1).standard_normal(inputs[name].shape)
        difference = lambda step, u=direction, name=name: (loss(name, u, step) - loss(name, u, -step)) / (2 * step)
        expected = (4 * difference(5e-4) - difference(1e-3)) / 3
        assert abs((gradients[f"d{name}"] * direction).sum() - expected) <= 1e-9 * max(1, abs(expected)), name


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_plain_computes_the_same_in_its_dtype(dtype, features):
    got, truth = plain(mask=causal(), **ARRAYS, **features, dtype=dtype), exact(mask=causal(), **ARRAYS, **features)
    allowed = {"float64": 1e-15, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    for name, mine, theirs in zip(Attention._fields, got, truth, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or relative_error(mine, theirs) <= allowed, name


def test_blocks_of_queries_change_nothing(monkeypatch):
    """Longer than a block, with everything on: the same as each batch row's halves of queries alone."""
    rng = np.random.default_rng(2)
    s, cut = 1030, 515
    q, dout = rng.standard_normal((2, 1, s, 1, 2))
    k, v = rng.standard_normal((2, 1, s, 1, 2))
    sees = np.sort(rng.integers(0, s + 1, (1, s, 2)), -1)
    features: dict[str, Any] = {"sinks": np.ones(1), "softcap": 2.0}
    whole = exact(q, k, v, full(), dout, extents=sees, **features)
    halves = [exact(q[:, at], k, v, full(), dout[:, at], extents=sees[:, at], **features) for at in np.s_[:cut, cut:]]
    np.testing.assert_allclose(whole.out, np.concatenate([half.out for half in halves], 1), rtol=0, atol=1e-15)
    for name in ("dk", "dv", "dsinks"):
        np.testing.assert_allclose(getattr(whole, name), sum(getattr(half, name) for half in halves), rtol=1e-14, atol=1e-14)


def test_an_unknown_feature_is_not_swallowed():
    with pytest.raises(TypeError, match="window"):
        exact(mask=full(), **ARRAYS, window=3)
