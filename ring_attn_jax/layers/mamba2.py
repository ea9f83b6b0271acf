"""The Mamba2 layer: a projection, a convolution, the state space and a gated norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ring_attn_core.constructor import extract, takes
from ring_attn_core.model.mixers import Mamba2Config

from ..recurrence.convolution import causal_conv
from ..recurrence.state_space import state_space
from ..ring.halo import wide
from .parts import LinearMap, RMSNorm
from .recurrent import Arrays, Inner, Recurrent, RecurrentArguments, Where


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
        layout, axis_name, mesh, batch_axes: as in :class:`RingAttention`.
        rngs: the generator of the initial weights.

    ``to_numpy`` gives weights the names and shapes of transformers' Mamba2Mixer. JAX sums the gradients of replicated weights
    over the ranks by itself. Raise ValueError if sizes do not fit, or the mesh lacks an axis.
    """

    @takes(Mamba2Arguments)
    def __init__(self, arguments: Mamba2Arguments) -> None:
        config, rngs = extract(Mamba2Config, arguments), arguments.rngs
        super().__init__(arguments, config, config.conv_bias)
        inner = config.heads * config.head_dim
        projected = inner + sum(config.parts) + config.heads
        self.in_proj = LinearMap(config.dim, projected, config.bias, config.param_dtype, rngs=rngs)
        self.norm = RMSNorm(inner, config.eps, config.param_dtype, config.groups)
        self.D = nnx.Param(jnp.ones_like(self.A_log[...]))
        self.out_proj = LinearMap(inner, config.dim, config.bias, config.param_dtype, rngs=rngs)

    def through(self, x: jax.Array, mixed: Callable[[Arrays, Arrays], jax.Array]) -> jax.Array:
        inner = self.config.heads * self.config.head_dim
        z, *tokens = jnp.split(self.in_proj(x), (inner, inner + sum(self.config.parts)), -1)
        weights = self.A_log[...], self.dt_bias[...], self.D[...], *self.conv1d.arrays
        out = mixed(tuple(tokens), weights).reshape(z.shape)
        return self.out_proj(self.norm(wide(out) * jax.nn.silu(wide(z))).astype(x.dtype))

    @staticmethod
    def _over_ring(config: Mamba2Config, tokens: Arrays, weights: Arrays, where: Where) -> jax.Array:
        scan = lambda x, dt, A, B, C, D: state_space(x, dt, A, B, C, D=D, **where)
        return Mamba2._mix(config, tokens, weights, partial(causal_conv, activation="silu", **where), scan)

    @staticmethod
    def _mix(config: Mamba2Config, tokens: Arrays, weights: Arrays, convolve: Inner, recur: Inner) -> jax.Array:
        (mixed, dt), (A_log, dt_bias, D, *taps) = tokens, weights
        mixed = convolve(mixed, *(each.astype(mixed.dtype) for each in taps))
        parts = zip(jnp.split(mixed, np.cumsum(config.parts)[:-1], -1), (config.heads, config.groups, config.groups), strict=True)
        x, B, C = (part.reshape(*part.shape[:2], heads, -1) for part, heads in parts)
        return recur(x, jax.nn.softplus(wide(dt) + dt_bias), -jnp.exp(A_log), B, C, D)
