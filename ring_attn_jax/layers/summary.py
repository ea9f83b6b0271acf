"""The SummaryAttention layer: projections, rotary embeddings and summary attention, an approximation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import nnx

from ring_attn_core.constructor import extract, takes
from ring_attn_core.masks import causal
from ring_attn_core.model.config import SparseConfig
from ring_attn_core.runs import Band
from ring_attn_core.variants.summary import SummaryOptions

from ..variants.summary import SummaryInputs, attention_with_summaries, run_sharded
from .projections import Projections
from .ring import ContiguousRing, LayerArguments


@dataclass(frozen=True, kw_only=True)
class SummaryArguments(LayerArguments, ContiguousRing, SparseConfig):
    """The arguments of SummaryAttention."""

    block: int
    summaries: int = 1
    window: int
    pooling: str = "attention"
    mask: Band = field(default_factory=causal, init=False)


class SummaryAttention(Projections):
    """Approximate causal multi-head attention: ``o(summary_attention(rotary(q(x)), rotary(k(x)), v(x), pool))``.

    Use it in place of :class:`RingAttention` when exact attention to the last tokens, plus summaries of all blocks before them,
    is enough. ``block``, ``summaries``, ``window``, ``pooling``: as in :func:`summary_attention`. Shards are contiguous. With one
    summary per block the parameter ``pool`` [summaries, kv_heads, head_dim] is initially 0, so that a summary begins as the mean
    of its block. With several summaries ``pool`` is drawn from a normal distribution, since equal rows would stay equal. With
    ``pooling="mean"`` the layer lacks this parameter. The other arguments are RingAttention's, without ``layout``, ``mask``,
    ``o_bias``, sinks, ALiBi and dropout. With ``mesh`` the layer takes global arrays, and its attention is
    :func:`sharded_summary_attention`.

    JAX sums the gradients of replicated weights over the ranks by itself, unless they are computed inside
    ``shard_map(check_vma=False)``. Raise ValueError if sizes do not fit, a number is outside its range, or the mesh lacks an
    axis.
    """

    @takes(SummaryArguments)
    def __init__(self, arguments: SummaryArguments) -> None:
        super().__init__(arguments, arguments.rngs)
        self.summary = summary = extract(SummaryOptions, arguments)
        config, make = self.config, nnx.initializers.zeros if summary.summaries == 1 else nnx.initializers.normal(1.0)
        shape, dtype = (summary.summaries, config.kv_heads, config.head_dim), jnp.dtype(config.param_dtype)
        self.pool = nnx.Param(make(arguments.rngs.params(), shape, dtype)) if summary.pooling == "attention" else None

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, length: int | None = None, *, key_mask: jax.Array | None = None
    ) -> jax.Array:
        """Apply attention to x [b s dim], this rank's contiguous shard (with a mesh: the global array); return [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the layout. ``length``: the
        global number of tokens without padding, if the shards hold padding. ``key_mask`` [b s]: as in summary_attention.

        Raise ValueError if x has a wrong shape, or if summary_attention refuses an argument.
        """
        pool = None if self.pool is None else self.pool[...]
        options = replace(self.summary, length=length)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            inputs = SummaryInputs(q, k, v, pool, key_mask)
            if (where := self.ring.sharded) is not None:
                return run_sharded(inputs, options, where)
            return attention_with_summaries(inputs, options, self.ring.axis_name)[0]

        return self.attended(attend, x, positions)
