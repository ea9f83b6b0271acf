"""Keys and values in float8 e4m3: numbers divided by a scale per layer and kv head, and clamped to -448 .. 448."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.cache import checks
from ring_attn_core.cache.spec import MAX_FLOAT8, CacheSpec

from ..ring.groups import Group, ranks_of

if TYPE_CHECKING:
    from .step import DecodeStep


def make_scales(spec: CacheSpec, k_scale: Tensor | None, v_scale: Tensor | None, device: torch.device) -> list[Tensor]:
    """Return the scales of k and v as float32 [layers, kv_heads] on ``device``, or zeros if they are None."""
    checks.check_scales(spec, {"k_scale": k_scale, "v_scale": v_scale}, lambda scale: scale)
    zeros = lambda: torch.zeros((spec.sizes.layers, spec.sizes.kv_heads), dtype=torch.float32, device=device)
    own = lambda scale: torch.as_tensor(scale).detach().to(device, torch.float32, copy=True)
    return [zeros() if scale is None else own(scale) for scale in (k_scale, v_scale)]


def of_first(
    k_scale: Tensor, v_scale: Tensor, nothing: Tensor, new: tuple[Tensor, Tensor], step: DecodeStep, ring: Group
) -> None:
    """Replace each 0 in a layer's scales [kv_heads] in place by the smallest power of two above max |x| / 448, or 1.

    The max is over the ``new`` k or v of all ranks; if it is 0, the scale is 1. The largest float8 number is 448;
    multiplication by a power of two is exact. ``nothing`` (0-d bool): the cache is empty, and nonzero scales are replaced too,
    since an earlier step that was never advanced may have set them.
    """
    real = (step.positions >= 0)[..., None, None]
    largest = torch.stack([x.abs().masked_fill(~real, 0).amax((0, 1, 3)).float() for x in new])
    if step.layout is not None and ranks_of(ring) > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=ring)
    _, exponent = torch.frexp(largest / MAX_FLOAT8)
    scales = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1)
    for scale, first in zip((k_scale, v_scale), scales, strict=True):
        scale.copy_(torch.where(nothing | (scale == 0), first, scale))


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Divide x [b, n, kv_heads, dim] by ``scale`` [kv_heads], clamp it to -448 .. 448 and convert it to float8."""
    return (x.float() / scale[:, None]).clamp(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn)


def restore(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply x [b, t, kv_heads, dim] by ``scale`` and convert it to ``dtype``. Return x unchanged if ``scale`` is None."""
    return x if scale is None else (x.float() * scale[:, None]).to(dtype)
