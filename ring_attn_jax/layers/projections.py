"""The base of the attention layers: projections, head norms, rotary embeddings and the ring."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.model.constructor import extract
from ring_attn_core.problem.options import Options
from ring_attn_core.releases import warn_if_untried

from .parts import LinearMap, RMSNorm
from .ring import LayerRing
from .rotary import RotaryEmbedding

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A function ``attend(q, k, v)`` that returns out [b s heads head_dim]."""


class Projections(nnx.Module):
    """The base of attention layers: projections ``q``, ``k``, ``v``, ``o``, head norms ``q_norm``, ``k_norm``, and ``rotary``.

    ``arguments``: the arguments of the layer's constructor. Three fields store them as records: ``config`` (an AttentionConfig),
    ``ring`` (a LayerRing) and ``options`` (the Options of attention). Norms and rotary are None if ``config`` has none.
    """

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
        """Return the output ``o(attend(q, k, v))`` [b s dim] for x [b s dim].

        Keys and values [b t kv_heads head_dim] are projected from ``context`` [b t dim], or from x if ``context`` is None. Before
        attention, q and k are normalized if ``qk_norm`` is set. A rotary embedding, if any, then rotates q by ``positions``. It
        rotates k by ``context_positions``, or without a context by ``positions``. None stands for the positions of the layout.
        ``attend``: returns [b s heads head_dim]. Raise ValueError if the shapes of x, context or positions do not fit, or if
        positions are not integers.
        """
        for name, value in (("x", x), ("context", context)):
            if value is not None and (value.ndim != 3 or value.shape[-1] != self.config.dim):
                raise ValueError(f"{name} must be [batch, tokens, {self.config.dim}], got {list(value.shape)}")
        self.ring.check_axis(self)
        source = x if context is None else context
        heads = ((self.q, x), (self.k, source), (self.v, source))
        q, k, v = (project(of).reshape(*of.shape[:2], -1, self.config.head_dim) for project, of in heads)
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
