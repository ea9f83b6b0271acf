"""Eager attention of transformers' models with its sums in other orders: what is only rounding shows as their difference."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

_order = [0]


@contextmanager
def permuted_by(order: int) -> Iterator[None]:
    """Inside this ``with`` the attention that is called "permuted" reads keys in another order."""
    before, _order[0] = _order[0], order
    try:
        yield
    finally:
        _order[0] = before


def permuted_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any) -> Any:
    """Run the model's own eager attention over keys in another order, with factors moved from one product to another.

    So (q / c) . k (c scale) is q . k scale, and p (v / c) c is p v, as a kernel scales queries first and divides by sums last.
    """
    order = torch.randperm(key.shape[2], generator=torch.Generator().manual_seed(_order[0]))
    eager = sys.modules[type(module).__module__].eager_attention_forward
    mask, factor = None if mask is None else mask[..., order], 1.0 + 2 * _order[0]
    scale = {"scaling": (others.pop("scaling", None) or query.shape[-1] ** -0.5) * factor}
    out, weights = eager(module, query / factor, key[:, :, order], value[:, :, order] / factor, mask, **others, **scale)
    return out * factor, weights


AttentionInterface.register("permuted", permuted_attention)
AttentionMaskInterface.register("permuted", AttentionMaskInterface()["eager"])
