"""Linear maps, norms and embedding lookups whose weights may differ from the inputs in dtype and sharding."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..attend.tiles import accumulation_dtype
from ..axes import sharded_like


class LinearMap(nnx.Linear):
    """``y = x W^T`` or ``y = x W^T + b``: [..., in] -> [..., out]. Weights are cast to x's dtype.

    The weight starts normal with standard deviation ``in ** -0.5``, the bias at 0. ``adapter``: None, or a function such as a
    LoRA whose result is added to y. flax stores the weight transposed, as ``kernel`` [in, out].
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, param_dtype: str = "float32", *, rngs: nnx.Rngs
    ) -> None:
        init = nnx.initializers.normal(in_features**-0.5)
        dtype = jnp.dtype(param_dtype)
        super().__init__(in_features, out_features, use_bias=bias, kernel_init=init, param_dtype=dtype, rngs=rngs)
        self.adapter: Callable[[jax.Array], jax.Array] | None = None

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        y = product(x, self.kernel[...].astype(x.dtype))
        y = y if self.bias is None else y + along_last(self.bias[...].astype(x.dtype), y)
        return y if self.adapter is None else y + self.adapter(x)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467, equation 4), in at least float32.
    ``groups``: the mean is over each of as many equal parts of it."""

    def __init__(self, dim: int, eps: float = 1e-6, param_dtype: str = "float32", groups: int = 1) -> None:
        self.weight = nnx.Param(jnp.ones(dim, jnp.dtype(param_dtype)))
        self.eps, self.groups = eps, groups

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(accumulation_dtype(x.dtype))
        if self.groups > 1:
            wide = wide.reshape(*x.shape[:-1], self.groups, -1)
        scale = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(x.dtype).astype(wide.dtype)
        return ((wide * scale).reshape(x.shape) * along_last(weight, x)).astype(x.dtype)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype for a config, such as "bfloat16" for jnp.bfloat16."""
    return dtype if isinstance(dtype, str) else jnp.dtype(dtype).name


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``x @ weight`` [..., out] for x [..., in] and weight [in, out]. Explicit mesh axes may shard the two differently.

    x keeps its sharding. Along ``out`` the weight stays sharded over axes that x does not use (tensor parallelism), and is
    all-gathered over other axes (FSDP).
    """
    x_specs, weight_specs = sharded_like(x), sharded_like(weight)
    if not any(x_specs) and not any(weight_specs):
        return x @ weight
    free = tuple(axis for axis in _names(weight_specs[1]) if not any(axis in _names(axes) for axes in x_specs)) or None
    out = on_mesh(PartitionSpec(*x_specs[:-1], free), x, weight)
    return jnp.dot(x, reshard(weight, PartitionSpec(x_specs[-1], free), x), out_sharding=out)


def along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Reshape [features] to [1, ..., 1, features] with x's number of dimensions, sharded like x's features."""
    vector = reshard(vector, PartitionSpec(sharded_like(x)[-1]), x)
    return jnp.expand_dims(vector, tuple(range(x.ndim - 1)))


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return ``table[ids]``, sharded like ``ids``, with NaN for ids outside of the table."""
    spec = sharded_like(ids)
    sharding = on_mesh(PartitionSpec(*spec, None), ids, table) if any(spec) or any(sharded_like(table)) else None
    table = reshard(table, PartitionSpec(None, None), ids)
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False, out_sharding=sharding)


def reshard(array: jax.Array, spec: PartitionSpec, *others: jax.Array) -> jax.Array:
    """Reshard ``array`` to ``spec`` over Explicit axes of its mesh, or of the first mesh in ``others`` if ``array`` has none."""
    return array if sharded_like(array) == spec else jax.sharding.reshard(array, on_mesh(spec, array, *others))


def gather_over(axes: Set[str], array: jax.Array) -> jax.Array:
    """All-gather ``array`` along the Explicit mesh axes ``axes``. Over other axes it stays sharded."""
    left = (tuple(axis for axis in _names(names) if axis not in axes) for names in sharded_like(array))
    return reshard(array, PartitionSpec(*(names or None for names in left)))


def on_mesh(spec: PartitionSpec, *arrays: jax.Array) -> NamedSharding:
    """Return the NamedSharding of ``spec`` on the mesh of the first array that has one."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return NamedSharding(next(mesh for mesh in meshes if not mesh.empty), spec)


def _names(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
