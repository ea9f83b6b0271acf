"""Linear maps and norms whose weights may differ from the inputs in dtype. Outputs are in the input's dtype or autocast's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call.prepare import dtype_name as dtype_name


class LinearMap(nn.Linear):
    """``y = x W^T`` or ``y = x W^T + b``: [..., in] -> [..., out]. Weights are cast to x's dtype, or to autocast's.

    The weight is drawn from a normal distribution with standard deviation ``in ** -0.5``, and the bias starts at 0.
    ``adapter``: None, or a module such as a LoRA; ``adapter(x)`` is added to y.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, param_dtype: str = "float32") -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=getattr(torch, param_dtype))
        self.adapter: nn.Module | None = None

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return y if self.adapter is None else y + self.adapter(x)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467, equation 4), in at least float32.
    ``groups``: the mean is over each of as many equal parts of it."""

    def __init__(self, dim: int, eps: float = 1e-6, param_dtype: str = "float32", groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=getattr(torch, param_dtype)))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        if self.groups > 1:
            parts = x.unflatten(-1, (self.groups, -1))
            return F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2) * self.weight.to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)
