"""What the layers are made of: linear maps and norms, their weights kept in a dtype of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..attend.tiles import accumulation_dtype


class Linear(nnx.Linear):
    """``y = x W^T``, or ``x W^T + b``, computed in x's dtype whatever dtype the weight is kept in: [..., in] -> [..., out].

    The weight starts normal with deviation ``in ** -0.5``, the bias 0. ``param_dtype``: the name of their dtype. flax keeps the
    weight transposed, as ``kernel`` [in, out].
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, param_dtype: str = "float32", *, rngs: nnx.Rngs
    ) -> None:
        init = nnx.initializers.normal(in_features**-0.5)
        dtype = jnp.dtype(param_dtype)
        super().__init__(in_features, out_features, use_bias=bias, kernel_init=init, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        y = x @ self.kernel[...].astype(x.dtype)
        return y if self.bias is None else y + _along_last(self.bias[...].astype(x.dtype), x.ndim)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467, equation 4), computed in float32."""

    def __init__(self, dim: int, eps: float = 1e-6, param_dtype: str = "float32") -> None:
        self.weight = nnx.Param(jnp.ones(dim, jnp.dtype(param_dtype)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(accumulation_dtype(x.dtype))
        scale = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(x.dtype).astype(wide.dtype)
        return (wide * scale * _along_last(weight, x.ndim)).astype(x.dtype)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, as a config has it: "bfloat16" of jnp.bfloat16."""
    return dtype if isinstance(dtype, str) else jnp.dtype(dtype).name


def _along_last(vector: jax.Array, ndim: int) -> jax.Array:
    """[features] -> [1, ..., 1, features] of ``ndim`` dimensions."""
    return jnp.expand_dims(vector, tuple(range(ndim - 1)))
