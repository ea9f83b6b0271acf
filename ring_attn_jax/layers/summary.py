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
from ring_attn_core.problem.options import Options
from ring_attn_core.variants.summary import SummaryOptions

from ..sharded import Where
from ..variants.summary import Inputs, attention_with_summaries, sharded
from .parts import dtype_name
from .projections import Projections


class SummaryAttention(Projections):
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
        config = AttentionConfig(
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
        of_summaries = SummaryOptions(
            block=block,
            summaries=summaries,
            window=window,
            pooling=pooling,
            softcap=softcap,
            strategy=strategy,
            backend=backend,
            deterministic=deterministic,
        )
        where = axis_name if mesh is None else Where.of(mesh, axis_name, batch_axes, head_axis)
        super().__init__(config, Options(layout="contiguous", softcap=softcap), where, rngs)
        self.of_summaries = of_summaries
        make = nnx.initializers.zeros if summaries == 1 else nnx.initializers.normal(1.0)
        draw = lambda: make(rngs.params(), (summaries, config.kv_heads, config.head_dim), jnp.dtype(config.param_dtype))
        self.pool = nnx.Param(draw()) if pooling == "attention" else None

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, length: int | None = None, *, key_mask: jax.Array | None = None
    ) -> jax.Array:
        """x [b s dim], this rank's shard in contiguous layout (with a mesh: the whole array) -> [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the layout. ``length``: the
        true global number of tokens, where the shards hold padding. ``key_mask`` [b s]: as summary_attention's.

        Raises ValueError for an x of another shape, and what summary_attention raises.
        """
        q, k, v = self.projected(x, positions)
        inputs = Inputs(q, k, v, None if self.pool is None else self.pool[...], key_mask)
        options = replace(self.of_summaries, length=length)
        if isinstance(self.where, Where):
            out = sharded(inputs, options, self.where)
        else:
            out, _ = attention_with_summaries(inputs, options, self.where)
        return self.o(out.reshape(*x.shape[:2], -1))
