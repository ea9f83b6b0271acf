"""Chunks of a recurrence in full precision, forward and backward, recomputed in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ring.carry import exact_products
from ..ring.derivatives import one_derivative


def exactly(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Compute ``function(*inputs)``, a tensor or a tuple of tensors that all depend on an input with a gradient. Neither tf32
    nor autocast lowers its products, also if the backward runs inside autocast; the backward computes it again."""
    return _Exact.apply(function, *inputs)


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        with exact_products(inputs[0]):
            return function(*inputs)

    @staticmethod
    @one_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        leaves = [x.detach().requires_grad_(is_needed) for x, is_needed in needed]
        wanted = [x for x in leaves if x.requires_grad]
        with torch.enable_grad(), exact_products(leaves[0]):
            out = ctx.function(*leaves)
            outs = zip(out if isinstance(out, tuple) else (out,), gradients, strict=True)
            outs, gradients = zip(*[(y, dy) for y, dy in outs if y.requires_grad], strict=True)
            found = iter(torch.autograd.grad(outs, wanted, gradients, allow_unused=True))
        return None, *(next(found) if x.requires_grad else None for x in leaves)
