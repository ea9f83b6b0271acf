"""Autograd Functions that have one derivative: a second one raises RuntimeError."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def one_derivative(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Make a second derivative of an autograd Function with this backward raise RuntimeError. PyTorch's ``once_differentiable``
    raises only if an incoming gradient requires one; otherwise a gradient penalty silently has no effect."""

    @wraps(backward)
    def checked(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            gradients = backward(ctx, *cotangents)
        if not torch.is_grad_enabled():  # no create_graph=True
            return gradients
        inputs = [x for x in (*ctx.saved_tensors, *cotangents) if x is not None and x.requires_grad]
        return tuple(None if x is None else _Last.apply(x, *inputs) for x in gradients)

    return checked


class _Last(torch.autograd.Function):
    """The identity on a gradient ``x``, recorded as a function of ``x`` and ``inputs``, whose backward raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError(
            "loss and token_log_probs have no second derivative: call backward or torch.autograd.grad without create_graph=True"
        )
