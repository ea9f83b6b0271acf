"""GatedDeltaNet and Mamba2 in float64, token by token, from weights by name; sizes, weights and data of small layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .recurrences import LENGTH, SEQUENTIAL

DIM, HEADS = 12, 4
SIZES: dict[str, dict[str, Any]] = {
    "GatedDeltaNet": {"key_heads": 2, "key_dim": 6, "value_dim": 5},
    "Mamba2": {"head_dim": 6, "state": 5, "groups": 2, "bias": True},
}

Weights = dict[str, Tensor]


def like(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """Return random weights of these shapes whose states decay slowly, so that a lost state is a large error."""
    rng = np.random.default_rng(3)
    weights = {name: rng.standard_normal(shape) * 0.4 + (len(shape) == 1) for name, shape in shapes.items()}
    decays = {"A_log": -1.0, "dt_bias": -2.0}
    for name, x in weights.items():
        if name.endswith(tuple(decays)):
            x[:] = decays[name.rpartition(".")[2]] + np.linspace(0, 1, len(x))
    return {name: x.astype(dtype) for name, x in weights.items()}


def tokens(seed: int) -> Tensor:
    """Return x, or its cotangent, [2, LENGTH, DIM] in the natural order of tokens."""
    return torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(layer: str, weights: dict[str, np.ndarray], begins: Tensor) -> dict[str, np.ndarray]:
    """Return ``out``, and the gradients of ``x`` and of each weight by name, under a random cotangent."""
    leaves = {name: torch.tensor(x, dtype=torch.float64, requires_grad=True) for name, x in weights.items()}
    x = tokens(1).requires_grad_()
    out = LAYERS[layer](leaves, x, begins)
    names = ["x", *leaves]
    gradients = torch.autograd.grad((out * tokens(2)).sum(), [x, *leaves.values()])
    return {"out": out.detach().numpy()} | {name: g.numpy() for name, g in zip(names, gradients, strict=True)}


def _gated_delta_net(w: Weights, x: Tensor, begins: Tensor) -> Tensor:
    sizes = SIZES["GatedDeltaNet"]
    keys, each = sizes["key_heads"], HEADS // sizes["key_heads"]
    heads = (x @ w["in_proj_qkvz.weight"].T).unflatten(-1, (keys, -1))
    q, k, v, z = heads.split([sizes["key_dim"]] * 2 + [each * sizes["value_dim"]] * 2, -1)
    b, a = (x @ w["in_proj_ba.weight"].T).unflatten(-1, (keys, 2, each)).unbind(-2)
    mixed = torch.cat([y.flatten(2) for y in (q, k, v)], -1)
    mixed = SEQUENTIAL["convolution"](mixed, w["conv1d.weight"][:, 0], torch.zeros(mixed.shape[-1], dtype=x.dtype), begins)
    q, k, v = mixed.split([keys * sizes["key_dim"]] * 2 + [HEADS * sizes["value_dim"]], -1)
    q, k = (y.unflatten(-1, (keys, -1)) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    g = -w["A_log"].exp() * F.softplus(a.flatten(2) + w["dt_bias"])
    out = SEQUENTIAL["gdn"](q, k, v.unflatten(-1, (HEADS, -1)), g, b.flatten(2).sigmoid(), begins)
    out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w["norm.weight"] * F.silu(z.reshape(out.shape))
    return out.flatten(2) @ w["out_proj.weight"].T


def _mamba2(w: Weights, x: Tensor, begins: Tensor) -> Tensor:
    sizes = SIZES["Mamba2"]
    inner, groups = HEADS * sizes["head_dim"], sizes["groups"]
    state = groups * sizes["state"]
    projected = x @ w["in_proj.weight"].T + w["in_proj.bias"]
    z, mixed, dt = projected.split([inner, inner + 2 * state, HEADS], -1)
    mixed = SEQUENTIAL["convolution"](mixed, w["conv1d.weight"][:, 0], w["conv1d.bias"], begins)
    u, B, C = (
        y.unflatten(-1, (n, -1)) for y, n in zip(mixed.split([inner, state, state], -1), (HEADS, groups, groups), strict=True)
    )
    dt = F.softplus(dt + w["dt_bias"])
    out = SEQUENTIAL["mamba2"](u, dt, B, C, -w["A_log"].exp(), w["D"], begins).flatten(2) * F.silu(z)
    parts = out.unflatten(-1, (groups, -1))
    out = (parts * (parts.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(2) * w["norm.weight"]
    return out @ w["out_proj.weight"].T + w["out_proj.bias"]


LAYERS = {"GatedDeltaNet": _gated_delta_net, "Mamba2": _mamba2}
