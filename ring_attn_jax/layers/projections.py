"""The base of attention layers: projections, norms of heads, rotary embeddings, and the ring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.problem.options import Options
from ring_attn_core.releases import warn_if_untried

from ..axes import ring_size
from ..data.layout import positions as positions_of
from ..sharded import ShardedAxes
from .parts import LinearMap, RMSNorm
from .rotary import RotaryEmbedding


class Projections(nnx.Module):
    """The base of attention layers: ``q``, ``k``, ``v``, ``o``, ``q_norm``, ``k_norm`` and ``rotary`` of ``config``.

    ``options``: the options of the attention; its layout determines the positions of a shard's tokens. ``where``: the ring, an
    axis of the shard_map around the layer, or the axes of a mesh that global arrays are sharded over.
    """

    def __init__(self, config: AttentionConfig, options: Options, where: ShardedAxes | str, rngs: nnx.Rngs) -> None:
        warn_if_untried("flax")
        self.config, self.options, self.where = config, options, where
        kept, size, turned = config.param_dtype, config.head_dim, config.rotary
        self.rotary = None if turned is None else RotaryEmbedding(size, turned.base, turned.scaling)
        self.q = LinearMap(config.dim, config.heads * size, config.qkv_bias, kept, rngs=rngs)
        self.k = LinearMap(config.dim, config.kv_heads * size, config.qkv_bias, kept, rngs=rngs)
        self.v = LinearMap(config.dim, config.kv_heads * size, config.qkv_bias, kept, rngs=rngs)
        self.o = LinearMap(config.heads * size, config.dim, config.o_bias, kept, rngs=rngs)
        self.q_norm = RMSNorm(size, config.eps, kept) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.eps, kept) if config.qk_norm else None

    def projected(
        self,
        x: jax.Array,
        positions: jax.Array | None,
        context: jax.Array | None = None,
        context_positions: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q [b s heads head_dim] of x [b s dim], and k and v [b t kv_heads head_dim] of context [b t dim].

        None as context: x. q and k are normalized and rotated, each by its positions, None for those of the layout. Raise
        ValueError if the shape of x or context does not fit.
        """
        for name, given in (("x", x), ("context", context)):
            if given is not None and (given.ndim != 3 or given.shape[-1] != self.config.dim):
                raise ValueError(f"{name} must be [batch, tokens, {self.config.dim}], got {list(given.shape)}")
        source = x if context is None else context
        heads = ((self.q, x), (self.k, source), (self.v, source))
        q, k, v = (project(of).reshape(*of.shape[:2], -1, self.config.head_dim) for project, of in heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            positions = self.layout_positions(x.shape[1]) if positions is None else positions
            if context is None:
                k_positions = positions
            else:
                k_positions = self.layout_positions(source.shape[1]) if context_positions is None else context_positions
            q, k = self.rotary(q, positions), self.rotary(k, k_positions)
        return q, k, v

    def layout_positions(self, tokens: int) -> jax.Array:
        """Return the global positions of this rank's shard of ``tokens`` (with a mesh: of all), int32 [tokens], with padding."""
        return layout_positions(self.options.layout, self.where, tokens)


def layout_positions(layout: str, where: ShardedAxes | str, tokens: int) -> jax.Array:
    """Return the global positions of a rank's shard of ``tokens`` in that layout, or of all on a mesh, int32 [tokens]."""
    if isinstance(where, ShardedAxes):
        held = jnp.concatenate([positions_of(layout, where.ranks, tokens, rank) for rank in range(where.ranks)])
    else:
        ranks = ring_size(where)
        held = positions_of(layout, ranks, tokens * ranks, lax.axis_index(where))
    return held[:tokens]  # longer if the layout cannot cut ``tokens`` equally, which ring_attention refuses
