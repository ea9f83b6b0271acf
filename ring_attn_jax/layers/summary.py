"""Summary attention, which is approximate, as a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.model.rotary import Rotary
from ring_attn_core.variants.summary import SummaryOptions

from ..sharded import Where
from ..variants.summary import Inputs, attention_with_summaries, sharded
from .attention import layout_positions
from .parts import Linear, RMSNorm, dtype_name
from .rotary import RotaryEmbedding


class SummaryAttention(nnx.Module):
    """Approximate causal multi-head attention: ``o(summary_attention(rotary(q(x)), rotary(k(x)), v(x), pool))``.

    It stands in for :class:`RingAttention` where exact attention to the last tokens and to summaries of all blocks before them
    will do. ``block``, ``summaries``, ``window``, ``pooling``: as in :func:`summary_attention`, whose layout is contiguous. The
    parameter ``pool`` [summaries, kv_heads, head_dim] is 0 at first for one summary a block, its mean; more of them, which would
    stay equal, start normal. ``pooling="mean"`` has no such parameter. The other arguments are RingAttention's; with ``mesh`` the
    layer takes whole arrays and calls :func:`sharded_summary_attention`.

    JAX sums the gradients of replicated weights over the ranks by itself. Raises ValueError for sizes that do not fit and
    numbers outside their range.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        block: int,
        summaries: int = 1,
        window: int,
        pooling: str = "attention",
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary_base: float | None = 10000.0,
        rotary: Rotary | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        eps: float = 1e-6,
        softcap: float | None = None,
        param_dtype: Any = "float32",
        axis_name: str = "seq",
        mesh: Mesh | None = None,
        batch_axes: str | Sequence[str] = (),
        head_axis: str | None = None,
        strategy: str = "auto",
        backend: str = "auto",
        deterministic: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config = AttentionConfig(
            dim=dim,
            heads=heads,
            kv_heads=kv_heads,  # type: ignore[arg-type]
            head_dim=head_dim,  # type: ignore[arg-type]
            rotary_base=rotary_base,
            rotary=rotary,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            eps=eps,
            softcap=softcap,
            param_dtype=dtype_name(param_dtype),
        )
        self.options = SummaryOptions(
            block=block,
            summaries=summaries,
            window=window,
            pooling=pooling,
            softcap=softcap,
            strategy=strategy,
            backend=backend,
            deterministic=deterministic,
        )
        self.where = axis_name if mesh is None else Where.of(mesh, axis_name, batch_axes, head_axis)
        kept, size, turned = config.param_dtype, config.head_dim, config.rotary
        self.rotary = None if turned is None else RotaryEmbedding(size, turned.base, turned.scaling)
        self.q = Linear(dim, heads * size, qkv_bias, kept, rngs=rngs)
        self.k = Linear(dim, config.kv_heads * size, qkv_bias, kept, rngs=rngs)
        self.v = Linear(dim, config.kv_heads * size, qkv_bias, kept, rngs=rngs)
        self.o = Linear(heads * size, dim, False, kept, rngs=rngs)
        self.q_norm = RMSNorm(size, eps, kept) if qk_norm else None
        self.k_norm = RMSNorm(size, eps, kept) if qk_norm else None
        self.pool = None
        if pooling == "attention":
            shape, dtype = (summaries, config.kv_heads, size), jnp.dtype(kept)
            pool = jnp.zeros(shape, dtype) if summaries == 1 else jax.random.normal(rngs.params(), shape, dtype)
            self.pool = nnx.Param(pool)

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, length: int | None = None, *, key_mask: jax.Array | None = None
    ) -> jax.Array:
        """x [b s dim], this rank's shard in contiguous layout (with a mesh: the whole array) -> [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the layout. ``length``: the
        true global number of tokens, where the shards hold padding. ``key_mask`` [b s]: as summary_attention's.

        Raises ValueError for an x of another shape, and what summary_attention raises.
        """
        if x.ndim != 3 or x.shape[-1] != self.config.dim:
            raise ValueError(f"x must be [batch, tokens, {self.config.dim}], got {list(x.shape)}")
        q, k, v = (project(x).reshape(*x.shape[:2], -1, self.config.head_dim) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            positions = self.layout_positions(x.shape[1]) if positions is None else positions
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        inputs = Inputs(q, k, v, None if self.pool is None else self.pool[...], key_mask)
        options = replace(self.options, length=length)
        if isinstance(self.where, Where):
            out = sharded(inputs, options, self.where)
        else:
            out, _ = attention_with_summaries(inputs, options, self.where)
        return self.o(out.reshape(*x.shape[:2], -1))

    def layout_positions(self, tokens: int) -> jax.Array:
        """int32 [tokens]: the global positions of this rank's shard of ``tokens`` (with a mesh: of all), padding included."""
        return layout_positions("contiguous", self.where, tokens)
