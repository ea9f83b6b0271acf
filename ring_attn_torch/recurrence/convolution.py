"""The short causal convolution of hybrid models, on shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ring_attn_core.problem.recurrence import check_convolution

from ..ring.halo import exchange_halo
from .runs import Layout, Ring, RunShard, Where

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def causal_conv(
    x: Float[Tensor, "batch seq_local channels"],
    weight: Float[Tensor, "channels taps"],
    bias: Float[Tensor, " channels"] | None = None,
    *,
    activation: str | None = None,
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Tensor, "rows seq_local 2"] | None = None,
) -> Float[Tensor, "batch seq_local channels"]:
    """Convolve each channel over the last ``taps`` tokens of its document.

        out[t, c] = activation(bias[c] + sum_lag weight[c, taps - 1 - lag] x[t - lag, c])

    ``x``: this rank's shard. ``weight`` and ``bias``: whole, the same on every rank; their gradients are of this rank's tokens,
    as any layer's: add them over the ranks (``sum_gradients``). ``activation``: None, "silu" or "swish". Padding gives 0.

    ``group``, ``layout``, ``length``, ``extents`` and errors are those of :func:`halo`, which sends the ``taps - 1`` tokens
    before each run. Raise ValueError also if weight, bias or activation do not fit.
    """
    return convolve(x, weight, bias, activation, Where(group, layout, length, extents))


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, where: Where) -> Tensor:
    """Compute ``causal_conv`` after the ``taps - 1`` tokens ``where.initial``."""
    taps = weight.shape[-1] if weight.ndim else 0
    shapes = tuple(weight.shape), None if bias is None else tuple(bias.shape)
    check = lambda _: check_convolution(tuple(x.shape), *shapes, activation)
    shard = RunShard.of("causal_conv", x, where, check, (shapes, activation))
    (x,) = shard.zero_padding(x)
    if taps > 1:
        ahead = shard.begin_after(shard.mask_halo(exchange_halo(x, shard.order, taps - 1, shard.ring)), where.initial)
    parts = []
    for i, (base, n, start) in enumerate(shard.runs):
        own = x[:, base : base + n]
        ahead_of_it = torch.cat([ahead[:, i], own], 1) if taps > 1 else own
        total = own * weight[:, -1]
        for lag in range(1, taps):
            before = ahead_of_it[:, taps - 1 - lag : taps - 1 - lag + n]
            if shard.begins is not None:
                position = torch.arange(start, start + n, device=x.device)
                before = torch.where((position - lag >= shard.begins[:, base : base + n])[..., None], before, 0)
            total = total + before * weight[:, taps - 1 - lag]
        total = total if bias is None else total + bias
        parts.append(total if activation is None else F.silu(total))
    return shard.join(parts)
