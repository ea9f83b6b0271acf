"""The GatedDeltaNet layer of Qwen3-Next: projections, a convolution, the gated delta rule and a gated norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ring_attn_core.constructor import extract, takes
from ring_attn_core.model.mixers import GatedDeltaNetConfig

from ..recurrence.convolution import causal_conv
from ..recurrence.delta_rule import gated_delta_rule
from ..ring.halo import wide
from .parts import LinearMap, RMSNorm
from .recurrent import Arrays, Inner, Recurrent, RecurrentArguments, Where


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
        layout, axis_name, mesh, batch_axes: as in :class:`RingAttention`.
        rngs: the generator of the initial weights.

    ``to_numpy`` gives weights the names and shapes of transformers' Qwen3NextGatedDeltaNet. JAX sums the gradients of replicated
    weights over the ranks by itself. Raise ValueError if sizes do not fit, or the mesh lacks an axis.
    """

    @takes(GatedDeltaNetArguments)
    def __init__(self, arguments: GatedDeltaNetArguments) -> None:
        config, rngs = extract(GatedDeltaNetConfig, arguments), arguments.rngs
        super().__init__(arguments, config, False)
        inner = config.heads * config.value_dim
        self.in_proj_qkvz = LinearMap(config.dim, sum(config.parts) + inner, False, config.param_dtype, rngs=rngs)
        self.in_proj_ba = LinearMap(config.dim, 2 * config.heads, False, config.param_dtype, rngs=rngs)
        self.norm = RMSNorm(config.value_dim, config.eps, config.param_dtype)
        self.out_proj = LinearMap(inner, config.dim, False, config.param_dtype, rngs=rngs)

    def through(self, x: jax.Array, mixed: Callable[[Arrays, Arrays], jax.Array]) -> jax.Array:
        config = self.config
        each = config.heads // config.key_heads  # in_proj_* hold the parts of a head of keys together
        values = each * config.value_dim
        q, k, v, z = _apart(self.in_proj_qkvz(x), config.key_heads, (config.key_dim, config.key_dim, values, values))
        b, a = _apart(self.in_proj_ba(x), config.key_heads, (each, each))
        tokens = jnp.concatenate([q, k, v], -1), b, a
        out = mixed(tokens, (*self.conv1d.arrays, self.A_log[...], self.dt_bias[...]))
        return self.out_proj((self.norm(out) * jax.nn.silu(z.reshape(out.shape))).reshape(*x.shape[:2], -1))

    @staticmethod
    def _over_ring(config: GatedDeltaNetConfig, tokens: Arrays, weights: Arrays, where: Where) -> jax.Array:
        rule = partial(gated_delta_rule, normalize=True, **where)
        return GatedDeltaNet._mix(config, tokens, weights, partial(causal_conv, activation="silu", **where), rule)

    @staticmethod
    def _mix(config: GatedDeltaNetConfig, tokens: Arrays, weights: Arrays, convolve: Inner, recur: Inner) -> jax.Array:
        (mixed, b, a), (taps, A_log, dt_bias) = tokens, weights
        mixed = convolve(mixed, taps.astype(mixed.dtype))
        q, k, v = jnp.split(mixed, np.cumsum(config.parts)[:-1], -1)
        q, k = (x.reshape(*x.shape[:2], config.key_heads, -1) for x in (q, k))
        g = -jnp.exp(A_log) * jax.nn.softplus(wide(a) + dt_bias)
        v = v.reshape(*v.shape[:2], config.heads, -1)
        return recur(q, k, v, g, jax.nn.sigmoid(b))


def _apart(x: jax.Array, heads: int, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Split [b s heads * sum(sizes)] into arrays [b s heads * size]."""
    parts = jnp.split(x.reshape(*x.shape[:2], heads, -1), np.cumsum(sizes)[:-1], -1)
    return [part.reshape(*x.shape[:2], -1) for part in parts]
