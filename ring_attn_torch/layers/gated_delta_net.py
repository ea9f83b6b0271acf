"""The GatedDeltaNet layer of Qwen3-Next: projections, a convolution, the gated delta rule and a gated norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn_core.constructor import extract, takes
from ring_attn_core.model.mixers import GatedDeltaNetConfig

from ..recurrence.delta_rule import gated_delta_rule
from ..ring.halo import wide
from .parts import LinearMap, RMSNorm
from .recurrent import Recurrent, RecurrentArguments


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetArguments(RecurrentArguments, GatedDeltaNetConfig):
    """The arguments of GatedDeltaNet."""


class GatedDeltaNet(Recurrent):
    """The gated delta rule as a layer over a ring (Yang et al., arXiv:2412.06464), as in Qwen3-Next.

        q, k, v = silu(conv1d(in_proj_qkvz(x)))          beta = sigmoid(b)     g = -exp(A_log) softplus(a + dt_bias)
        out_proj(norm(gated_delta_rule(q, k, v, g, beta)) * silu(z))           z of in_proj_qkvz, b and a of in_proj_ba

    Arguments:
        dim, heads: features of x; number of heads of v, each with a state.
        key_heads: number of heads of q and k, a divisor of heads. None: heads.
        key_dim, value_dim: features of a head of q and k, and of v. None: dim / heads.
        taps: tokens that the convolution sees.
        eps: the epsilon of the norm over value_dim.
        param_dtype: the dtype of the weights; A_log and dt_bias have at least float32.
        layout, group: as in :class:`RingAttention`.

    Weights have the names and shapes of transformers' Qwen3NextGatedDeltaNet. A rank's gradients of the weights are partial: sum
    them over the ranks with :func:`sum_gradients`. Raise ValueError if sizes do not fit.
    """

    config: GatedDeltaNetConfig

    @takes(GatedDeltaNetArguments)
    def __init__(self, arguments: GatedDeltaNetArguments) -> None:
        config = extract(GatedDeltaNetConfig, arguments)
        super().__init__(arguments, config, False)
        inner = config.heads * config.value_dim
        self.in_proj_qkvz = LinearMap(config.dim, sum(config.parts) + inner, False, config.param_dtype)
        self.in_proj_ba = LinearMap(config.dim, 2 * config.heads, False, config.param_dtype)
        self.norm = RMSNorm(config.value_dim, config.eps, config.param_dtype)
        self.out_proj = LinearMap(inner, config.dim, False, config.param_dtype)

    @staticmethod
    def _rule(where: dict[str, Any], *arrays: Tensor) -> Tensor:
        return gated_delta_rule(*arrays, normalize=True, **where)

    def mix(self, x: Tensor, convolve: Callable[..., Tensor], recur: Callable[..., Tensor]) -> Tensor:
        config = self.config
        each, size = config.heads // config.key_heads, config.key_heads  # in_proj_* hold the parts of a head of keys together
        apart = lambda y, *sizes: y.unflatten(-1, (size, -1)).split(sizes, -1)
        values = each * config.value_dim
        q, k, v, z = apart(self.in_proj_qkvz(x), config.key_dim, config.key_dim, values, values)
        b, a = (y.flatten(2) for y in apart(self.in_proj_ba(x), each, each))
        mixed = torch.cat([y.flatten(2) for y in (q, k, v)], -1)
        mixed = convolve(mixed, *self.conv1d.like(mixed)).split(config.parts, -1)
        q, k, v = (
            y.unflatten(-1, (-1, n)) for y, n in zip(mixed, (config.key_dim, config.key_dim, config.value_dim), strict=True)
        )
        g = -self.A_log.exp() * F.softplus(wide(a) + self.dt_bias)
        out = recur(q, k, v, g, b.sigmoid())
        return self.out_proj((self.norm(out) * F.silu(z.reshape(out.shape))).flatten(2))
