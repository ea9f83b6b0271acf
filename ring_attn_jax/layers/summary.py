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

from ..sharded import ShardedAxes
from ..variants.summary import SummaryInputs, attention_with_summaries, sharded
from .parts import dtype_name
from .projections import Projections


class SummaryAttention(Projections):
    """Approximate causal multi-head attention: ``o(summary_attention(rotary(q(x)), rotary(k(x)), v(x), pool))``.

    Attention over a window of exact tokens plus pooled summaries of all blocks before it. Use it in place of
    :class:`RingAttention` if that is enough. ``block``, ``summaries``, ``window``, ``pooling``: as in :func:`summary_attention`,
    whose layout is contiguous. The parameter ``pool`` [summaries, kv_heads, head_dim] is 0 at first for one summary per block,
    its mean; several, which would stay equal, start normal. ``pooling="mean"`` has no such parameter. The other arguments are
    those of RingAttention; with ``mesh`` the layer takes global arrays and calls :func:`sharded_summary_attention`.

    JAX sums the gradients of replicated weights over the ranks by itself. Raise ValueError if sizes do not fit or a number is
    outside its range.
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
        where = axis_name if mesh is None else ShardedAxes.of(mesh, axis_name, batch_axes, head_axis)
        super().__init__(config, Options(layout="contiguous", softcap=softcap), where, rngs)
        self.of_summaries = of_summaries
        make = nnx.initializers.zeros if summaries == 1 else nnx.initializers.normal(1.0)
        draw = lambda: make(rngs.params(), (summaries, config.kv_heads, config.head_dim), jnp.dtype(config.param_dtype))
        self.pool = nnx.Param(draw()) if pooling == "attention" else None

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, length: int | None = None, *, key_mask: jax.Array | None = None
    ) -> jax.Array:
        """Attend over x [b s dim], this rank's shard in contiguous layout (with a mesh: the global array); return [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the layout. ``length``: the
        global number of tokens without padding, if the shards hold padding. ``key_mask`` [b s]: as in summary_attention.

        Raise ValueError if the shape of x does not fit, or summary_attention refuses an argument.
        """
        q, k, v = self.projected(x, positions)
        inputs = SummaryInputs(q, k, v, None if self.pool is None else self.pool[...], key_mask)
        options = replace(self.of_summaries, length=length)
        if isinstance(self.where, ShardedAxes):
            out = sharded(inputs, options, self.where)
        else:
            out, _ = attention_with_summaries(inputs, options, self.where)
        return self.o(out.reshape(*x.shape[:2], -1))
