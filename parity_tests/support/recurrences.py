"""Recurrences and convolutions of hybrid models: problems in float64, and the rules token by token, with gradients by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ring_attn_torch

Rows = Sequence[Sequence[int]]
"""The lengths of each row's documents; all rows have equally many tokens."""
LENGTH = 83
DOCUMENTS: Rows = [[5, 1, 40, 2, 30, 5], [30, 3, 3, 44, 3]]
"""The documents of two rows: of 1 token, shorter than a convolution, and over three runs and more."""


@dataclass(frozen=True)
class Problem:
    """One call: the rule, its arrays, of which the first ``sharded`` belong to tokens, and its other arguments."""

    rule: str
    arrays: tuple[Tensor, ...]
    sharded: int
    begins: Tensor
    """int [rows, tokens]: the first position of each token's document."""

    def rounded(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the arrays of tokens in ``dtype``, and whole arrays, whose gradients ranks add, in at least float32."""
        weights = torch.promote_types(dtype, torch.float32)
        return [x.to(dtype if i < self.sharded else weights) for i, x in enumerate(self.arrays)]

    def reference(self, dtype: torch.dtype = torch.float64) -> list[np.ndarray]:
        """Return the result and the gradients, token by token, of arrays that are rounded to ``dtype``."""
        leaves = [x.double().clone().requires_grad_() for x in self.rounded(dtype)]
        out = SEQUENTIAL[self.rule](*leaves, self.begins)
        gradients = torch.autograd.grad((out * self.cotangent(out.shape).to(dtype).double()).sum(), leaves)
        return [x.detach().numpy() for x in (out, *gradients)]

    @staticmethod
    def cotangent(shape: Any) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        return tuple(self.arrays[2 if self.rule in ("gdn", "kda") else 0].shape)


def call(package: Any, rule: str, arrays: Any, **where: Any) -> Any:
    """Call the function of ``ring_attn_jax`` or ``ring_attn_torch`` that computes a rule."""
    if rule in ("gdn", "kda"):
        return package.gated_delta_rule(*arrays, **where)
    if rule == "convolution":
        return package.causal_conv(*arrays, activation="silu", **where)
    x, dt, B, C, A, D = arrays
    return package.state_space(x, dt, A, B, C, D=D, **where)


def ids_of(rows: Rows) -> Tensor:
    """Return the document of each token, int [rows, tokens]."""
    return torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in rows])


def place(layout: str, ranks: int, rows: Rows = DOCUMENTS) -> Any:
    """Return the layout's name, or the balanced layout of the documents."""
    if layout != "balanced":
        return layout
    ids = ids_of(rows)
    return ring_attn_torch.shard_batch(torch.zeros_like(ids), layout, ranks, 0, documents=ids).layout


def relative(found: Any, expected: Any) -> float:
    """Return the norm of the error over that of the expected array, or over 0.01 if that is less: a gradient may be 0."""
    return float(np.linalg.norm(np.asarray(found) - expected) / max(np.linalg.norm(expected), 0.01))


def make(rule: str, documents: bool, rows: Rows = DOCUMENTS) -> Problem:
    """Return a problem with slow decay, so that a lost state is a large error. ``documents``: rows are packed documents."""
    generator = torch.Generator().manual_seed(len(rule))
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    uniform = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)
    tokens = len(rows), sum(rows[0])
    begins = torch.zeros(tokens, dtype=torch.long)
    if documents:
        starts = [[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in rows]
        begins = torch.tensor(starts)
    if rule in ("gdn", "kda"):
        q, k = normal(*tokens, 1, 4), torch.nn.functional.normalize(normal(*tokens, 1, 4), dim=-1)
        g = -uniform(*tokens, 3, *([4] if rule == "kda" else [])) / 10
        return Problem(rule, (q, k, normal(*tokens, 3, 5), g, 2 * uniform(*tokens, 3)), 5, begins)
    if rule == "convolution":
        return Problem(rule, (normal(*tokens, 6), normal(6, 4), normal(6)), 1, begins)
    if rule == "mamba2":
        arrays = (
            normal(*tokens, 4, 3),
            uniform(*tokens, 4) / 5,
            normal(*tokens, 2, 5),
            normal(*tokens, 2, 5),
            -uniform(4),
            normal(4),
        )
        return Problem(rule, arrays, 4, begins)
    arrays = normal(*tokens, 4), uniform(*tokens, 4) / 5, normal(*tokens, 5), normal(*tokens, 5), -uniform(4, 5), normal(4)
    return Problem(rule, arrays, 4, begins)


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, begins: Tensor) -> Tensor:
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q * q.shape[-1] ** -0.5, k))
    state, out = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = _forget(state, begins, t) * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        written = (v[:, t] - (state * k[:, t, ..., None]).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * written[..., None, :]
        out.append((state * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1)


def _mamba2(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, begins: Tensor) -> Tensor:
    B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (B, C))
    state, out = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3]), []
    for t in range(x.shape[1]):
        kept = _forget(state, begins, t) * (dt[:, t] * A).exp()[..., None, None]
        state = kept + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        out.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1)


def _mamba1(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, begins: Tensor) -> Tensor:
    state, out = x.new_zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        kept = _forget(state, begins, t) * (dt[:, t, :, None] * A).exp()
        state = kept + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        out.append((state * C[:, t, None]).sum(-1) + D * x[:, t])
    return torch.stack(out, 1)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor, begins: Tensor) -> Tensor:
    out = []
    for t in range(x.shape[1]):
        seen = [lag for lag in range(weight.shape[1]) if t - lag >= 0]
        terms = [torch.where((t - lag >= begins[:, t])[:, None], x[:, t - lag], 0) * weight[:, -1 - lag] for lag in seen]
        out.append(torch.nn.functional.silu(bias + sum(terms)))
    return torch.stack(out, 1)


def _forget(state: Tensor, begins: Tensor, t: int) -> Tensor:
    return torch.where((begins[:, t] == t).view(-1, *[1] * (state.ndim - 1)), 0, state)


SEQUENTIAL: dict[str, Callable[..., Tensor]] = {
    "gdn": _delta_rule,
    "kda": _delta_rule,
    "mamba2": _mamba2,
    "mamba1": _mamba1,
    "convolution": _convolution,
}
