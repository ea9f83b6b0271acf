"""The base of the attention layers: projections, head norms, rotary embeddings and the ring."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from ring_attn_core.constructor import extract
from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.problem.options import Options
from ring_attn_core.releases import warn_if_untried

from .parts import LinearMap, RMSNorm
from .ring import LayerRing
from .rotary import RotaryEmbedding

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A function ``attend(q, k, v)`` that returns out [b s heads head_dim]."""


class Projections(nnx.Module):
    """The base of attention layers: projections ``q``, ``k``, ``v``, ``o``, head norms ``q_norm``, ``k_norm``, and ``rotary``."""

    def __init__(self, arguments: AttentionConfig, rngs: nnx.Rngs) -> None:
        warn_if_untried("flax")
        self.config = config = extract(AttentionConfig, arguments)
        self.options, self.ring = extract(Options, arguments), extract(LayerRing, arguments)
        dtype, size, rotary = config.param_dtype, config.head_dim, config.rotary
        self.rotary = None if rotary is None else RotaryEmbedding(size, rotary.base, rotary.scaling)
        self.q = LinearMap(config.dim, config.heads * size, config.qkv_bias, dtype, rngs=rngs)
        self.k = LinearMap(config.dim, config.kv_heads * size, config.qkv_bias, dtype, rngs=rngs)
        self.v = LinearMap(config.dim, config.kv_heads * size, config.qkv_bias, dtype, rngs=rngs)
        self.o = LinearMap(config.heads * size, config.dim, config.o_bias, dtype, rngs=rngs)
        self.q_norm = RMSNorm(size, config.eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.eps, dtype) if config.qk_norm else None

    def attended(
        self,
        attend: Attend,
        x: jax.Array,
        positions: jax.Array | None,
        context: jax.Array | None = None,
        context_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Return ``o(attend(q, k, v))`` [b s dim], with q of x [b s dim], and k and v of ``context`` [b t dim] or x.

        ``attend`` returns [b s heads head_dim]. Positions None: those of the layout.
        """
        for name, value in (("x", x), ("context", context)):
            if value is not None and (value.ndim != 3 or value.shape[-1] != self.config.dim):
                raise ValueError(f"{name} must be [batch, tokens, {self.config.dim}], got {list(value.shape)}")
        self.ring.check_axis(self)
        source = x if context is None else context
        heads = ((self.q, x), (self.k, source), (self.v, source))
        q, k, v = (project(inputs).reshape(*inputs.shape[:2], -1, self.config.head_dim) for project, inputs in heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            positions = self.ring.positions(x.shape[1]) if positions is None else positions
            if context is None:
                k_positions = positions
            else:
                k_positions = self.ring.positions(source.shape[1]) if context_positions is None else context_positions
            q, k = self.rotary(q, positions), self.rotary(k, k_positions)
        return self.o(attend(q, k, v).reshape(*x.shape[:2], -1))
