"""Cross-attention of a sequence over another one of a different length, with the results in float64."""

from __future__ import annotations

import numpy as np

from ring_attn_core import full
from ring_attn_core.reference.oracle import exact
from ring_attn_core.reference.tolerance import relative_error

from .models import BATCH, LAYER, LENGTH, Arrays, layer_weights, rotate

CONTEXT_LENGTH = 23


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x [b LENGTH dim], context [b CONTEXT_LENGTH dim], the mask of its tokens, and the cotangent of the output."""
    rng = np.random.default_rng(9)
    x, dout = rng.standard_normal((2, BATCH, LENGTH, LAYER["dim"])).astype(np.float32)
    context = rng.standard_normal((BATCH, CONTEXT_LENGTH, LAYER["dim"])).astype(np.float32)
    return x, context, rng.random((BATCH, CONTEXT_LENGTH)) < 0.7, dout


def cross_attention(rotary: bool) -> Arrays:
    """Return out, dx, dcontext and the gradient of every weight in float64, in natural order."""
    weights = {name: w.astype(np.float64) for name, w in layer_weights().items()}
    x, context, key_mask, dout = (a if a.dtype == bool else a.astype(np.float64) for a in arrays())
    heads = lambda t: t.reshape(*t.shape[:2], -1, LAYER["head_dim"])
    flat = lambda t: t.reshape(*t.shape[:2], -1)
    turn = lambda t, sign=1: rotate(t, np.arange(t.shape[1]), sign=sign) if rotary else t
    q, k, v = (heads(of @ weights[f"{name}.weight"].T) for name, of in (("q", x), ("k", context), ("v", context)))
    inner = exact(turn(q), turn(k), v, full(), heads(dout @ weights["o.weight"]), key_mask=key_mask)
    dq, dk, dv = flat(turn(inner.dq, -1)), flat(turn(inner.dk, -1)), flat(inner.dv)
    attended = flat(inner.out)
    result = {"out": attended @ weights["o.weight"].T, "dx": dq @ weights["q.weight"]}
    result["dcontext"] = dk @ weights["k.weight"] + dv @ weights["v.weight"]
    result["o.weight"] = np.einsum("bsi,bsj->ij", dout, attended)
    for name, gradient, of in (("q", dq, x), ("k", dk, context), ("v", dv, context)):
        result[f"{name}.weight"] = np.einsum("bsi,bsj->ij", gradient, of)
    return result


def check_cross_attention(got: Arrays, rotary: bool) -> None:
    """Assert that results and gradients, in natural order, equal float64's to float32's rounding."""
    truth = cross_attention(rotary)
    assert got.keys() == truth.keys()
    for name, expected in truth.items():
        assert relative_error(got[name], expected) <= 1e-6, f"{name}: {relative_error(got[name], expected):.3g}"
