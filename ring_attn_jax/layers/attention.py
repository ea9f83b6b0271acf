"""The RingAttention layer: projections, rotary embeddings and ring attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from ring_attn_core.constructor import takes
from ring_attn_core.data.trees import tree_objection
from ring_attn_core.masks import causal
from ring_attn_core.model.alibi import alibi_slopes
from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.runs import Band

from ..attend.dropout import dropout_state
from ..attend.tiles import accumulation_dtype
from ..axes import ring_size
from ..call.autograd import attention
from ..call.prepare import Arrays
from ..call.traced import TracedLayout, trace_layout
from ..sharded import run_sharded
from .projections import Projections
from .ring import LayerArguments, LayerRing


@dataclass(frozen=True, kw_only=True)
class RingAttentionArguments(LayerArguments, LayerRing, AttentionConfig):
    """The arguments of RingAttention."""


class RingAttention(Projections):
    """Multi-head attention over a ring: ``o(ring_attention(rotary(q(x)), rotary(k(x)), v(x)))``.

    Arguments:
        dim, heads: features of x; number of query heads.
        kv_heads: number of key heads, a divisor of heads. None: heads.
        head_dim: features of a head. None: dim / heads.
        axis_name: the ring, a mesh axis of the shard_map that the layer is called in.
        mesh, batch_axes, head_axis: if ``mesh`` is passed, call the layer on global arrays in layout order, sharded over it,
            instead of inside a shard_map. Its attention is then :func:`sharded_ring_attention` with these arguments.
        layout, mask, strategy, order, backend, deterministic: as in :func:`ring_attention`.
        rotary: the position embedding, a ``Rotary`` of :mod:`ring_attn_core.model.rotary` with an optional scaling.
        rotary_base: ``rotary_base=b`` is short for ``rotary=Rotary(b)``. If both are None, q and k are not rotated.
        qk_norm: apply an :class:`RMSNorm` over head_dim to q and k before the rotary embedding, as in Qwen3.
        eps: the epsilon of this norm.
        qkv_bias: q, k and v have biases, as in Qwen2.
        o_bias: o has a bias, as in Llama with attention_bias.
        softcap: scores become ``softcap tanh(score / softcap)``.
        sinks: each head has one learned logit in the softmax's denominator, the parameter ``sinks`` [heads], initially 0, in
            float32 unless ``param_dtype`` is float64.
        alibi: add ``slope_h (k_pos - q_pos)`` in global positions to the scores, with the fixed slopes of
            :func:`~ring_attn_core.model.alibi.alibi_slopes`. They take the place of the rotary embedding, so usually pass
            ``rotary_base=None`` too.
        dropout_rate: the fraction of the attention probabilities that calls with a ``dropout_seed`` drop; others drop nothing.
        param_dtype: the dtype of the weights, by name or as a jax.numpy dtype. The projections compute in x's dtype.
        rngs: the generator of the initial weights.

    JAX sums the gradients of replicated weights over the ranks by itself, unless they are computed inside
    ``shard_map(check_vma=False)``. Raise ValueError if sizes do not fit, a number is outside its range, or the mesh lacks an
    axis.
    """

    @takes(RingAttentionArguments)
    def __init__(self, arguments: RingAttentionArguments) -> None:
        super().__init__(arguments, arguments.rngs)
        dtype = accumulation_dtype(jnp.dtype(self.config.param_dtype))
        self.sinks = nnx.Param(jnp.zeros(self.config.heads, dtype)) if self.config.sinks else None

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        length: int | None = None,
        *,
        extents: jax.Array | None = None,
        key_extents: jax.Array | None = None,
        key_mask: jax.Array | None = None,
        longest_path: int | None = None,
        layout: BalancedLayout | TracedLayout | None = None,
        dropout_seed: int | jax.Array | None = None,
        dropout_offset: tuple[int | jax.Array, int | jax.Array] = (0, 0),
        context: jax.Array | None = None,
        context_positions: jax.Array | None = None,
        context_length: int | None = None,
    ) -> jax.Array:
        """Apply attention to x [b s dim], this rank's shard in layout order (with a mesh: the global array); return [b s dim].

        Arguments:
            positions: int [s] or [b s], global positions for the rotary embedding. None: those of the layout.
            length: the global number of tokens without padding, if the shards hold padding.
            extents, key_extents, key_mask: [b s 2], [b s 2] and [b s], as in ring_attention.
            longest_path: the number of tokens on the longest path of a prefix tree: pass ``shard.longest_path`` if the shard's
                ``key_extents`` describe a tree. Windows and ALiBi slopes count positions of the packed row, not of a path. So
                with it the layer refuses slopes, a window of fewer than ``longest_path`` tokens (the query included), a mask that
                is not causal, and a rotary embedding without ``positions``. Any other window hides nothing on any path and is
                ignored. Without it a layer with a window or slopes refuses ``key_extents``.
            layout: the ``.layout`` of a shard of ``shard_batch(..., layout="balanced")``, or a TracedLayout of it. None: the
                layer's own layout. If the shard is balanced, None silently gives wrong results; :class:`RingTransformer` detects
                most such calls.
            dropout_seed: an int or a 0-d integer array, the same on every rank and different at every step. Dropout applies only
                if it is passed.
            dropout_offset: as in ring_attention.
            context: [b t dim], sharded like x: a second sequence for cross-attention, the source of the keys and values. With it,
                ``key_mask`` [b t], ``extents`` and the layer's mask refer to the context's tokens. If each query is to see the
                whole context, construct the layer with ``mask=full()``, and usually with ``rotary_base=None``.
            context_positions: int [t] or [b t], the positions of the context's tokens. None: those of the layout.
            context_length: the context's global number of tokens without padding. None: all tokens of its shards.

        Raise ValueError if x or context has a wrong shape, if a ``context_...`` argument lacks ``context``, or if ring_attention
        refuses an argument.
        """
        for name, value in (("context_positions", context_positions), ("context_length", context_length)):
            if value is not None and context is None:
                raise ValueError(f"{name} was given without context: pass the sequence that it is about, or positions and length")

        mask = self._mask_on_tree(key_extents is not None, longest_path, positions is not None or self.config.rotary is None)
        if positions is None and layout is not None and self.config.rotary is not None:
            positions = self.ring.positions(x.shape[1], layout)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            rate = 0.0 if dropout_seed is None else self.config.dropout_rate
            state = dropout_state(dropout_seed, dropout_offset) if rate else None
            kv_length = context_length
            if context is not None and context_length is None:
                kv_length = k.shape[1] * (ring_size(self.ring.axis_name) if self.ring.mesh is None else 1)
            own = self.options if layout is None or isinstance(layout, TracedLayout) else replace(self.options, layout=layout)
            options = replace(own, mask=mask, length=length, kv_length=kv_length, dropout_rate=rate)
            arrays = Arrays(extents, key_mask, self.local_sinks, self.slopes(q), state, key_extents)
            where = self.ring.sharded
            if isinstance(layout, TracedLayout):
                options, arrays = trace_layout(options, layout, arrays, q.shape, None if where else self.ring.axis_name)
            if where is not None:
                return run_sharded(q, k, v, arrays, options, where)
            return attention(q, k, v, arrays, options, self.ring.axis_name)[0]

        return self.attended(attend, x, positions, context, context_positions)

    def _mask_on_tree(self, key_extents: bool, longest_path: int | None, path_positions: bool) -> Band:
        """Return the mask of a call: ``causal()`` if the call passes ``longest_path``, as for a tree; else the layer's mask.

        ``path_positions``: False if the layer has a rotary embedding and the call passes no ``positions``.
        """
        wrong = tree_objection(self.options.mask, key_extents, longest_path, self.config.alibi, path_positions)
        if wrong is not None:
            raise ValueError(wrong)
        return self.options.mask if longest_path is None else causal()

    @property
    def local_sinks(self) -> jax.Array | None:
        """The sinks [heads] as an array, or None without sinks."""
        return None if self.sinks is None else self.sinks[...]

    def slopes(self, q: jax.Array) -> jax.Array | None:
        """Return the ALiBi slopes [heads], or None without ALiBi.

        Their dtype is float64 if q is float64, else float32.
        """
        return jnp.asarray(alibi_slopes(self.config.heads), accumulation_dtype(q.dtype)) if self.config.alibi else None
