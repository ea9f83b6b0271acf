"""LoRA of a RingTransformer: add adapters, merge them into the weights, and save them for peft.

The formula is in :mod:`ring_attn_core.model.lora`. Weights may be whole on each device or sharded over a mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ring_attn_core.model.lora import LoRA, write_adapters

from ..attend.tiles import accumulation_dtype
from ..layers.parts import LinearMap, product
from ..layers.transformer import RingTransformer
from .ranks import gather_to_host, run_on_all


class Adapter(nnx.Module):
    """The map ``x -> scale (x a^T) b^T``, [..., in] -> [..., out], with ``a`` [rank, in], ``b`` [out, rank], in x's dtype."""

    def __init__(self, a: jax.Array, b: jax.Array, scale: float) -> None:
        self.a, self.b, self.scale = nnx.LoRAParam(a), nnx.LoRAParam(b), scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return product(product(x, self.a[...].astype(x.dtype).T) * self.scale, self.b[...].astype(x.dtype).T)


def add_adapters(model: RingTransformer, lora: LoRA, first: Mapping[str, tuple[Any, Any]]) -> None:
    """Add adapters, in at least float32, to ``model``. ``first``: (a [rank, in], b [out, rank]) by name of the linear map."""
    linears = dict(_linears(model))
    for name, arrays in first.items():
        a, b = (jnp.asarray(x, accumulation_dtype(linears[name].kernel.dtype)) for x in arrays)
        linears[name].adapter = nnx.data(Adapter(a, b, lora.scale))


def merge_adapters(model: nnx.Module) -> None:
    """Add ``scale b a`` to each weight with an adapter, and remove the adapters. Shardings stay as they are."""
    for _, linear, adapter in _find_adapted(model):
        kernel, scale = linear.kernel[...], adapter.scale

        def merged(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float = scale) -> jax.Array:
            return (kernel + scale * jnp.matmul(b, a, precision="highest").T).astype(kernel.dtype)

        linear.kernel[...] = jax.jit(merged, out_shardings=kernel.sharding)(kernel, adapter.a[...], adapter.b[...])
        linear.adapter = nnx.static(None)


def save_adapters(model: nnx.Module, lora: LoRA, folder: str | Path, base: str | None) -> None:
    """Save the adapters in the format of peft, as :func:`write_adapters`. Each process must call it; process 0 writes."""
    from safetensors.numpy import save_file

    whole = {name: (gather_to_host(each.a[...]), gather_to_host(each.b[...])) for name, _, each in _find_adapted(model)}
    run_on_all(lambda: None if jax.process_index() else write_adapters(folder, lora, whole, base, save_file))  # type: ignore[arg-type]


def _linears(model: nnx.Module) -> Iterator[tuple[str, LinearMap]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, LinearMap):
            yield ".".join(map(str, path)), module


def _find_adapted(model: nnx.Module) -> Iterator[tuple[str, LinearMap, Adapter]]:
    """Yield (name, linear map, adapter) of each linear map with an adapter, in the order of the names."""
    for name, linear in sorted(_linears(model), key=lambda each: each[0]):
        if isinstance(linear.adapter, Adapter):
            yield name, linear, linear.adapter
