"""Keys and values in float8 e4m3: numbers divided by a scale per layer and kv head, and clamped to -448 .. 448."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.cache import checks
from ring_attn_core.cache.spec import MAX_FLOAT8, CacheSpec

from ..axes import vary_alike
from ..data.extents import on_host

if TYPE_CHECKING:
    from .step import DecodeStep


def make_scales(spec: CacheSpec, k_scale: Any, v_scale: Any) -> list[jax.Array]:
    """Return the scales of k and v as float32 [layers, kv_heads], or zeros if they are None."""
    checks.check_scales(spec, {"k_scale": k_scale, "v_scale": v_scale}, on_host)
    zeros = lambda: jnp.zeros((spec.sizes.layers, spec.sizes.kv_heads), jnp.float32)  # two arrays, so that both can be donated
    return [zeros() if scale is None else jnp.asarray(scale, jnp.float32) for scale in (k_scale, v_scale)]


def of_first(
    scales: tuple[jax.Array, jax.Array], nothing: jax.Array, new: tuple[jax.Array, jax.Array], step: DecodeStep, axis_name: str
) -> list[jax.Array]:
    """Return a layer's scales [kv_heads], with 0 replaced by the smallest power of two above max |x| / 448 over all ranks. If
    the cache holds ``nothing``, replace all, which a step that was never advanced may have set."""
    real = (step.positions >= 0)[..., None, None]
    largest = jnp.stack([jnp.where(real, jnp.abs(x), jnp.zeros((), x.dtype)).max((0, 1, 3)).astype(jnp.float32) for x in new])
    (largest,) = vary_alike((axis_name,), largest)
    largest = lax.pmax(largest, axis_name)
    _, exponent = jnp.frexp(largest / MAX_FLOAT8)
    least = jnp.where(largest > 0, jnp.ldexp(jnp.ones_like(largest), exponent), 1)
    return [jnp.where(nothing | (scale == 0), each, scale) for scale, each in zip(scales, least, strict=True)]


def quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide x [b, n, kv_heads, dim] by ``scale`` [kv_heads], clamp it to -448 .. 448 and convert it to float8."""
    return jnp.clip(x.astype(jnp.float32) / scale[None, None, :, None], -MAX_FLOAT8, MAX_FLOAT8).astype(jnp.float8_e4m3fn)


def restore(x: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Multiply x [b, t, kv_heads, dim] by ``scale`` and convert it to ``dtype``. Return x unchanged if ``scale`` is None."""
    return x if scale is None else (x.astype(jnp.float32) * scale[None, None, :, None]).astype(dtype)
