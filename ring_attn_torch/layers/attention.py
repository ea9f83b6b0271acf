"""The RingAttention layer: projections, rotary embeddings and ring attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ring_attn_core.constructor import takes
from ring_attn_core.data.trees import tree_objection
from ring_attn_core.kernels.backends import check_vendor
from ring_attn_core.masks import causal
from ring_attn_core.model.alibi import alibi_slopes
from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.model.masks import layer_offset
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.runs import Band

from ..attend.dropout import Dropout
from ..attend.tiles import accumulation_dtype
from ..call.autograd import attention
from ..call.prepare import Arrays
from ..ring.agreement import refuse, same_error
from ..ring.groups import group_name, local, ring_of
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
        group: the ring, a ProcessGroup or 1-D DeviceMesh; None: the default group, or a ring of one rank if torch.distributed is
            not initialized.
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
        param_dtype: the dtype of the weights, by name or as a torch.dtype. The projections compute in x's dtype, or autocast's.

    A rank's gradients of the weights are partial: sum them over the ranks with :func:`sum_gradients`. Raise ValueError if sizes
    do not fit, a number is outside its range, or ``deterministic`` is combined with a backend that is not deterministic.
    """

    @takes(RingAttentionArguments)
    def __init__(self, arguments: RingAttentionArguments) -> None:
        super().__init__(arguments)
        check_vendor(self.options, differentiates_lse=False)
        self.first_head = 0  # the first of this rank's heads under tensor parallelism
        dtype = accumulation_dtype(self.q.weight.dtype)
        self.sinks = nn.Parameter(torch.zeros(self.config.heads, dtype=dtype)) if self.config.sinks else None

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        length: int | None = None,
        *,
        extents: Tensor | None = None,
        key_extents: Tensor | None = None,
        key_mask: Tensor | None = None,
        longest_path: int | None = None,
        layout: BalancedLayout | None = None,
        dropout_seed: int | Tensor | None = None,
        dropout_offset: tuple[int | Tensor, int | Tensor] = (0, 0),
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
        context_length: int | None = None,
    ) -> Tensor:
        """Apply attention to x [b s dim], this rank's shard in layout order; return [b s dim].

        Arguments:
            positions: int [s] or [b s], global positions for the rotary embedding. None: those of the layout.
            length: the global number of tokens without padding, if the shards hold padding.
            extents, key_extents, key_mask: [b s 2], [b s 2] and [b s], as in ring_attention.
            longest_path: the number of tokens on the longest path of a prefix tree: pass ``shard.longest_path`` if the shard's
                ``key_extents`` describe a tree. Windows and ALiBi slopes count positions of the packed row, not of a path. So
                with it the layer refuses slopes, a window of fewer than ``longest_path`` tokens (the query included), a mask that
                is not causal, and a rotary embedding without ``positions``. Any other window hides nothing on any path and is
                ignored. Without it a layer with a window or slopes refuses ``key_extents``.
            layout: the ``.layout`` of a shard of ``shard_batch(..., layout="balanced")``, for this call. None: the layer's
                own layout. If the shard is balanced, None silently gives wrong results; :class:`RingTransformer` detects most
                such calls.
            dropout_seed: an int or a 0-d integer tensor, the same on every rank and different at every step. Dropout applies if
                and only if it is passed; ``self.training`` is ignored.
            dropout_offset: as in ring_attention.
            context: [b t dim], sharded like x: a second sequence for cross-attention, the source of the keys and values. With it,
                ``key_mask`` [b t], ``extents`` and the layer's mask refer to the context's tokens. If each query is to see the
                whole context, construct the layer with ``mask=full()``, and usually with ``rotary_base=None``.
            context_positions: int [t] or [b t], the positions of the context's tokens. None: those of the layout.
            context_length: the context's global number of tokens without padding. None: all tokens of its shards.

        Raise ValueError if x or context has a wrong shape, or if the layer or ring_attention refuses an argument.
        """
        for name, value in (("context_positions", context_positions), ("context_length", context_length)):
            if value is not None and context is None:
                raise ValueError(f"{name} was given without context: pass the sequence that it is about, or positions and length")

        mask = self._mask_on_tree(key_extents is not None, longest_path, positions is not None or self.config.rotary is None)
        if positions is None and layout is not None and self.config.rotary is not None:
            with same_error(ring_of(self.ring.group)):
                positions = self.ring.positions(x.shape[1], x.device, layout)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            offset = layer_offset(dropout_offset, 1, self.first_head) if self.first_head else dropout_offset
            dropout = None if dropout_seed is None else Dropout(dropout_seed, offset)
            rate = 0.0 if dropout_seed is None else self.config.dropout_rate
            kv_length = context_length
            if context is not None and context_length is None:
                kv_length = k.shape[1] * self.ring.ranks
            own = self.options if layout is None else replace(self.options, layout=layout)
            options = replace(own, mask=mask, length=length, kv_length=kv_length, dropout_rate=rate)
            arrays = Arrays(extents, key_mask, self.local_sinks, self.slopes(q), None, key_extents)
            return attention(q, k, v, arrays, dropout, options, group_name(self.ring.group))[0]

        return self.attended(attend, x, positions, context, context_positions)

    def _mask_on_tree(self, key_extents: bool, longest_path: int | None, path_positions: bool) -> Band:
        wrong = tree_objection(self.options.mask, key_extents, longest_path, self.config.alibi, path_positions)
        if wrong is not None:
            refuse(ValueError(wrong), ring_of(self.ring.group))
        return self.options.mask if longest_path is None else causal()

    @property
    def local_sinks(self) -> Tensor | None:
        """The sinks of this rank's heads, or None without sinks."""
        return None if self.sinks is None else local(self.sinks)

    def slopes(self, q: Tensor) -> Tensor | None:
        """Return the ALiBi slopes [heads] of q's heads, on q's device, or None without ALiBi.

        Their dtype is float64 if q is float64, else float32. They are computed at each call, because ``.bfloat16()`` would round
        a buffer.
        """
        if not self.config.alibi:
            return None
        heads = torch.arange(self.first_head, self.first_head + q.shape[2], dtype=torch.float64, device=q.device)
        return alibi_slopes(self.config.heads, heads).to(accumulation_dtype(q.dtype))
