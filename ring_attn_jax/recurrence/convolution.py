"""The short causal convolution of hybrid models, on shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ring_attn_core.problem.recurrence import check_convolution

from ..ring.halo import exchange_halo
from .runs import Layout, RunShard, Where

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def causal_conv(
    x: Float[Array, "batch seq_local channels"],
    weight: Float[Array, "channels taps"],
    bias: Float[Array, " channels"] | None = None,
    *,
    activation: str | None = None,
    axis_name: str = "seq",
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Array, "rows seq_local 2"] | None = None,
) -> Float[Array, "batch seq_local channels"]:
    """Convolve each channel over the last ``taps`` tokens of its document.

        out[t, c] = activation(bias[c] + sum_lag weight[c, taps - 1 - lag] x[t - lag, c])

    ``x``: this rank's shard. ``weight`` and ``bias``: whole, the same on every rank. ``activation``: None, "silu" or "swish".
    Padding gives 0.

    ``axis_name``, ``layout``, ``length``, ``extents`` and errors are those of :func:`halo`, which sends the ``taps - 1`` tokens
    before each run. Raise ValueError also if weight, bias or activation do not fit.
    """
    return convolve(x, weight, bias, activation, Where(axis_name, layout, length, extents))


def convolve(x: jax.Array, weight: jax.Array, bias: jax.Array | None, activation: str | None, where: Where) -> jax.Array:
    """Compute ``causal_conv`` after the ``taps - 1`` tokens ``where.initial``."""
    taps = weight.shape[-1] if weight.ndim else 0
    check = lambda _: check_convolution(x.shape, weight.shape, None if bias is None else bias.shape, activation)
    shard = RunShard.of("causal_conv", x, where, check)
    (x,) = shard.zero_padding(x)
    ahead = own = shard.to_runs(x)
    if taps > 1:
        ahead = shard.begin_after(shard.mask_halo(exchange_halo(x, shard.order, taps - 1, shard.axis_name)), where.initial)
    tokens, documents = jnp.concatenate([ahead, own], 2) if taps > 1 else own, shard.documents(x.shape[0])
    out = own * weight[:, -1]
    for lag in range(1, taps):
        before = tokens[:, :, taps - 1 - lag : taps - 1 - lag + own.shape[2]]
        if shard.begins is not None:
            before = jnp.where((shard.positions() - lag >= documents)[..., None], before, 0)
        out = out + before * weight[:, taps - 1 - lag]
    out = out if bias is None else out + bias
    return shard.join(out if activation is None else jax.nn.silu(out))
