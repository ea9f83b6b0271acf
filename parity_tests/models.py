"""A small layer and a small transformer: sizes, weights and data in numpy, and the layer's mathematics without any framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from ring_attn_core import Band, causal
from ring_attn_core.oracle import exact, plain
from ring_attn_core.tolerance import bound, relative_error

Arrays = dict[str, np.ndarray]

LENGTH, BATCH, VOCAB = 37, 2, 31
LAYER: dict[str, Any] = {"dim": 24, "heads": 4, "kv_heads": 2, "head_dim": 8}
TRANSFORMER: dict[str, Any] = {"vocab": VOCAB, "depth": 2, "hidden": 40, **LAYER}
PROJECTIONS = {"q.weight": (32, 24), "k.weight": (16, 24), "v.weight": (16, 24), "o.weight": (24, 32)}


def layer_weights() -> Arrays:
    rng = np.random.default_rng(1)
    return {name: (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32) for name, shape in PROJECTIONS.items()}


def layer_data() -> tuple[np.ndarray, np.ndarray]:
    """x and the cotangent of the output, [batch, length, dim] in the natural order of tokens."""
    rng = np.random.default_rng(2)
    x, dout = rng.standard_normal((2, BATCH, LENGTH, LAYER["dim"])).astype(np.float32)
    return x, dout


def transformer_weights(tied: bool = True, depth: int = TRANSFORMER["depth"]) -> Arrays:
    """Weights of a size that keeps every gradient alive, norms included."""
    dim, hidden = TRANSFORMER["dim"], TRANSFORMER["hidden"]
    shapes = {"embed.weight": (VOCAB, dim), "norm.weight": (dim,)} | ({} if tied else {"head.weight": (VOCAB, dim)})
    for i in range(depth):
        shapes |= {f"blocks.{i}.attention.{name}": shape for name, shape in PROJECTIONS.items()}
        shapes |= {f"blocks.{i}.mlp.{name}.weight": (hidden, dim) for name in ("gate", "up")}
        shapes |= {f"blocks.{i}.mlp.down.weight": (dim, hidden)}
        shapes |= {f"blocks.{i}.{name}.weight": (dim,) for name in ("attention_norm", "mlp_norm")}
    rng = np.random.default_rng(3)
    return {
        name: (rng.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype(np.float32) for name, shape in sorted(shapes.items())
    }


def token_ids(batch: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """ids and labels int32 [batch, length] in natural order; of the labels a stretch at the start is ignored."""
    rng = np.random.default_rng(4)
    ids = rng.integers(0, VOCAB, (batch, LENGTH)).astype(np.int32)
    labels = np.concatenate([ids[:, 1:], np.full((batch, 1), -100, np.int32)], 1)
    labels[:, :11] = -100
    return ids, labels


def rotate(x: np.ndarray, positions: np.ndarray, base: float = 10000.0, sign: int = 1) -> np.ndarray:
    """Rotary embedding of x [b s h d] in x's dtype, with angles in float64; ``sign=-1`` turns back."""
    half = x.shape[-1] // 2
    angles = sign * positions.astype(np.float64)[:, None, None] * base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1).astype(x.dtype)


def attention_layer(
    weights: Arrays,
    x: np.ndarray,
    dout: np.ndarray,
    mask: Band = causal(),
    base: float | None = 10000.0,
    dtype: str | None = None,
) -> Arrays:
    """out, dx and the gradient of every weight of RingAttention: exact in float64, or as one device computes it in ``dtype``."""
    working = np.float64 if dtype is None else np.dtype(dtype)
    weights, x, dout = {name: w.astype(working) for name, w in weights.items()}, x.astype(working), dout.astype(working)
    where = np.arange(x.shape[1])
    turn = lambda t, sign=1: t if base is None else rotate(t, where, base, sign)
    heads = lambda t: t.reshape(*t.shape[:2], -1, LAYER["head_dim"])
    flat = lambda t: t.reshape(*t.shape[:2], -1)
    q, k, v = (heads(x @ weights[f"{name}.weight"].T) for name in "qkv")
    arguments = (turn(q), turn(k), v, mask, heads(dout @ weights["o.weight"]))
    inner = exact(*arguments) if dtype is None else plain(*arguments, dtype)
    gradients = {"q": flat(turn(inner.dq, -1)), "k": flat(turn(inner.dk, -1)), "v": flat(inner.dv)}
    attended = flat(inner.out)
    result = {"out": attended @ weights["o.weight"].T, "dx": sum(g @ weights[f"{name}.weight"] for name, g in gradients.items())}
    result |= {f"{name}.weight": np.einsum("bsi,bsj->ij", g, x) for name, g in gradients.items()}
    return result | {"o.weight": np.einsum("bsi,bsj->ij", dout, attended)}


def check_layer(got: Arrays, weights: Arrays, x: np.ndarray, dout: np.ndarray, **arguments: Any) -> None:
    """Assert that out, dx and every weight's gradient are as near to float64 as a plain float32 computation."""
    truth = attention_layer(weights, x, dout, **arguments)
    reference = attention_layer(weights, x, dout, dtype="float32", **arguments)
    assert got.keys() == truth.keys()
    for name, mine in got.items():
        error, allowed = relative_error(mine, truth[name]), bound(reference[name], truth[name], "float32")
        assert error <= allowed, f"{name}: error {error:.3g} against float64, allowed {allowed:.3g}"


def assert_near(got: Arrays, expected: Arrays, relative: float) -> None:
    """Assert that two results of the same names differ by at most ``relative`` in norm, each by itself."""
    assert got.keys() == expected.keys()
    for name in expected:
        distance = np.linalg.norm(np.asarray(got[name] - expected[name])) / np.linalg.norm(np.asarray(expected[name]))
        assert distance <= relative, f"{name} differs by {distance:.3g}, allowed {relative:.3g}"
