"""Ring attention as a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ring_attn_core.masks import causal
from ring_attn_core.model.alibi import alibi_slopes
from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.model.rotary import Rotary
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band

from ..attend.dropout import draw_of
from ..attend.tiles import accumulation_dtype
from ..axes import ring_size
from ..call.autograd import attention
from ..call.prepare import Arrays
from ..sharded import ShardedAxes, sharded
from .parts import dtype_name
from .projections import Projections


class RingAttention(Projections):
    """Multi-head attention over a ring: ``o(ring_attention(rotary(q(x)), rotary(k(x)), v(x)))``.

    ``dim``: features of x. ``heads`` query heads of ``head_dim`` (None: dim / heads); ``kv_heads`` (None: heads) divides heads.
    ``layout``, ``mask``, ``strategy``, ``backend``, ``deterministic``: as in :func:`ring_attention`. ``axis_name``: the ring, a
    mesh axis of the shard_map that the layer is called in. With ``mesh`` the layer takes global arrays in layout order instead,
    sharded over the mesh, and calls :func:`sharded_ring_attention` with ``batch_axes`` and ``head_axis``. Computes in x's dtype,
    in whichever dtype the weights are.

    ``rotary``: the position embedding as a record of :mod:`ring_attn_core.model.rotary`, with a scaling if it has one;
    ``rotary_base`` is short for ``Rotary(base)``, None for attention without positions. ``qk_norm``: q and k pass an
    :class:`RMSNorm` over head_dim with ``eps`` before the rotation, as in Qwen3. ``qkv_bias``: q, k and v have biases, as in
    Qwen2; ``o_bias``: o has one too, as in Llama with attention_bias. ``param_dtype``: the dtype of new weights, by name or as
    the framework's own.

    ``softcap``: scores become ``softcap tanh(score / softcap)``. ``sinks``: each head learns one logit in the softmax's
    denominator, the parameter ``sinks`` [heads], 0 at first, float32 unless ``param_dtype`` is float64. ``alibi``: scores get
    ``slope_h (k_pos - q_pos)`` in global positions, with the fixed slopes of :func:`~ring_attn_core.model.alibi.alibi_slopes`;
    usual with ``rotary_base=None``. ``dropout_rate``: the share of the attention probabilities to drop in a call with a
    ``dropout_seed``; a call without one is evaluation.

    JAX sums the gradients of replicated weights over the ranks by itself. Raise ValueError if sizes do not fit or a number is
    outside its range.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        layout: str = "zigzag",
        mask: Band = causal(),
        rotary_base: float | None = 10000.0,
        rotary: Rotary | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        o_bias: bool = False,
        eps: float = 1e-6,
        softcap: float | None = None,
        sinks: bool = False,
        alibi: bool = False,
        dropout_rate: float = 0.0,
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
            mask=mask,
            rotary_base=rotary_base,
            rotary=rotary,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            eps=eps,
            softcap=softcap,
            sinks=sinks,
            alibi=alibi,
            dropout_rate=dropout_rate,
            param_dtype=dtype_name(param_dtype),
        )
        options = Options(
            layout=layout, mask=mask, softcap=softcap, strategy=strategy, backend=backend, deterministic=deterministic
        )
        where = axis_name if mesh is None else ShardedAxes.of(mesh, axis_name, batch_axes, head_axis)
        super().__init__(config, options, where, rngs)
        self.sinks = nnx.Param(jnp.zeros(heads, accumulation_dtype(jnp.dtype(config.param_dtype)))) if sinks else None

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        length: int | None = None,
        *,
        extents: jax.Array | None = None,
        key_extents: jax.Array | None = None,
        key_mask: jax.Array | None = None,
        dropout_seed: int | jax.Array | None = None,
        dropout_offset: tuple[int | jax.Array, int | jax.Array] = (0, 0),
        context: jax.Array | None = None,
        context_positions: jax.Array | None = None,
        context_length: int | None = None,
    ) -> jax.Array:
        """Attend over x [b s dim], this rank's shard in layout order (with a mesh: the global array); return [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the layout. ``length``: the
        global number of tokens without padding, if the shards hold padding. ``extents``, ``key_extents`` [b s 2], ``key_mask``
        [b s]: as in ring_attention. ``dropout_seed``: an int or a 0-d integer array, the same on each rank and different at
        each step; dropout applies only if it is passed. ``dropout_offset``: as in ring_attention.

        ``context`` [b t dim], sharded like x: cross-attention, with the keys and values of this other sequence, of
        ``context_length`` tokens without padding (None: all that its shards hold), at ``context_positions``, as ``positions`` are
        x's. ``key_mask`` [b t], ``extents`` and the mask then refer to its tokens: for queries that see all of it make the layer
        with ``mask=full()``, and mostly with ``rotary_base=None``.

        Raise ValueError if the shape of x or context does not fit, or ring_attention refuses an argument.
        """
        for name, given in (("context_positions", context_positions), ("context_length", context_length)):
            if given is not None and context is None:
                raise ValueError(f"{name} was given without context: pass the sequence that it is about, or positions and length")
        q, k, v = self.projected(x, positions, context, context_positions)
        rate = 0.0 if dropout_seed is None else self.config.dropout_rate
        draw = draw_of(dropout_seed, dropout_offset) if rate else None
        slopes = jnp.asarray(alibi_slopes(self.config.heads), accumulation_dtype(q.dtype)) if self.config.alibi else None
        arrays = Arrays(extents, key_mask, None if self.sinks is None else self.sinks[...], slopes, draw, key_extents)
        kv_length = None if context is None else self._held(context.shape[1]) if context_length is None else context_length
        options = replace(self.options, length=length, kv_length=kv_length, dropout_rate=rate)
        if isinstance(self.where, ShardedAxes):
            out = sharded(q, k, v, arrays, options, self.where)
        else:
            out, _ = attention(q, k, v, arrays, options, self.where)
        return self.o(out.reshape(*x.shape[:2], -1))

    def _held(self, tokens: int) -> int:
        """Return the global length of an array of ``tokens``: with a mesh the array is global, else it is one rank's shard."""
        return tokens if isinstance(self.where, ShardedAxes) else tokens * ring_size(self.where)
