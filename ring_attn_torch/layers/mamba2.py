"""The Mamba2 layer: a projection, a convolution, the state space and a gated norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attn_core.constructor import extract, takes
from ring_attn_core.model.mixers import Mamba2Config

from ..recurrence.state_space import state_space
from ..ring.halo import wide
from .parts import LinearMap, RMSNorm
from .recurrent import Recurrent, RecurrentArguments


@dataclass(frozen=True, kw_only=True)
class Mamba2Arguments(RecurrentArguments, Mamba2Config):
    """The arguments of Mamba2."""


class Mamba2(Recurrent):
    """The state space of Mamba-2 as a layer over a ring (Dao and Gu, arXiv:2405.21060), as in Nemotron-H and Granite 4.

        z, y, dt = in_proj(x)     x', B, C = silu(conv1d(y))     dt = softplus(dt + dt_bias)     A = -exp(A_log)
        out_proj(norm(state_space(x', dt, A, B, C, D=D) * silu(z)))                              norm: over each group

    Arguments:
        dim, heads: features of x; number of heads, each with a state.
        head_dim: features of a head. None: 2 dim / heads.
        state: features of B and C.
        groups: number of groups of heads, a divisor of heads; a group shares B and C.
        taps: tokens that the convolution sees.
        bias, conv_bias: in_proj and out_proj have biases; conv1d has one.
        eps: the epsilon of the norm over the heads of a group.
        param_dtype: the dtype of the weights; A_log, dt_bias and D have at least float32.
        layout, group: as in :class:`RingAttention`.

    Weights have the names and shapes of transformers' Mamba2Mixer. A rank's gradients of the weights are partial: sum them over
    the ranks with :func:`sum_gradients`. Raise ValueError if sizes do not fit.
    """

    config: Mamba2Config

    @takes(Mamba2Arguments)
    def __init__(self, arguments: Mamba2Arguments) -> None:
        config = extract(Mamba2Config, arguments)
        super().__init__(arguments, config, config.conv_bias)
        inner = config.heads * config.head_dim
        self.in_proj = LinearMap(config.dim, inner + sum(config.parts) + config.heads, config.bias, config.param_dtype)
        self.norm = RMSNorm(inner, config.eps, config.param_dtype, config.groups)
        self.D = nn.Parameter(torch.ones_like(self.A_log))
        self.out_proj = LinearMap(inner, config.dim, config.bias, config.param_dtype)

    @staticmethod
    def _rule(where: dict[str, Any], *arrays: Tensor) -> Tensor:
        return state_space(*arrays[:5], D=arrays[5], **where)

    def mix(self, x: Tensor, convolve: Callable[..., Tensor], recur: Callable[..., Tensor]) -> Tensor:
        config = self.config
        inner = config.heads * config.head_dim
        z, y, dt = self.in_proj(x).split([inner, sum(config.parts), config.heads], -1)
        mixed = convolve(y, *self.conv1d.like(y)).split(config.parts, -1)
        u, B, C = (
            part.unflatten(-1, (n, -1)) for part, n in zip(mixed, (config.heads, config.groups, config.groups), strict=True)
        )
        dt, A = F.softplus(wide(dt) + self.dt_bias), -self.A_log.exp()
        out = recur(u, dt, A, B, C, self.D).flatten(2)
        return self.out_proj(self.norm(wide(out) * F.silu(wide(z))).to(x.dtype))
