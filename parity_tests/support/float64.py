"""Layers in float64 without any float32 inside: their inputs and expected outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ring_attn_core.model.rotary import NTK, Linear, Llama3, Rotary, YaRN, attention_factor, inverse_frequencies

from .models import LENGTH, Arrays, arguments_of_attention, assert_near, attention_layer, layer_data, layer_weights

CLOSE = 1e-12
"""The largest relative error of float64 results; float32 anywhere inside gives at least 1e-8."""

ROTARIES = [Rotary(500.0, scaling) for scaling in (None, Linear(3.0), NTK(4.0), YaRN(8.0, 64), Llama3(8.0, 1.0, 4.0, 64))]

LAYERS: dict[str, dict[str, Any]] = {
    "rotary": {"rotary_base": 100.0},
    "everything": arguments_of_attention()["everything"] | {"heads": 6, "rotary_base": 100.0},
}
"""RingAttention's arguments. ALiBi's slopes of 6 heads are not powers of 2."""


def layer(name: str) -> tuple[Arrays, np.ndarray, np.ndarray, dict[str, Any]]:
    """Return weights, x, the cotangent of the output and the arguments of a layer; none of their numbers is exact in float32."""
    arguments = LAYERS[name]
    sizes = {name: x for name, x in arguments.items() if name in ("heads", "sinks")}
    third = lambda x: x.astype(np.float64) / 3
    weights = {name: third(x) for name, x in layer_weights(**sizes).items()}
    x, dout = layer_data()
    return weights, third(x), third(dout), arguments | {"param_dtype": "float64"}


def check(got: Arrays, name: str) -> None:
    """Assert that out, dx and the gradient of every weight are exact."""
    weights, x, dout, _ = layer(name)
    features = {name: x for name, x in LAYERS[name].items() if name != "heads"}
    assert all(x.dtype == np.float64 for x in got.values())
    assert_near(got, attention_layer(weights, x, dout, **features), CLOSE)


def turned(rotary: Rotary, where: np.ndarray, head_dim: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Return x [b s h head_dim], and x after the rotary embedding of its positions."""
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, head_dim))
    turns = np.exp(1j * where[..., None, None] * np.array(inverse_frequencies(rotary, head_dim))) * attention_factor(rotary)
    exact = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * turns
    return x, np.concatenate([exact.real, exact.imag], -1)
