"""Ring attention as a module."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.kernels.backends import check_vendor
from ring_attn_core.masks import causal
from ring_attn_core.model.alibi import alibi_slopes
from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.model.masks import layer_offset
from ring_attn_core.model.rotary import Rotary
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band

from ..attend.dropout import Dropout
from ..attend.tiles import accumulation_dtype
from ..call.autograd import attention
from ..call.prepare import Arrays
from ..ring.groups import group_name, local, ranks_of
from .parts import dtype_name
from .projections import Projections, ring_of


class RingAttention(Projections):
    """Multi-head attention over a ring: ``o(ring_attention(rotary(q(x)), rotary(k(x)), v(x)))``.

    ``dim``: features of x. ``heads``: query heads, of ``head_dim`` features (None: dim / heads). ``kv_heads`` (None: heads) must
    divide heads. ``layout``, ``mask``, ``strategy``, ``backend``, ``deterministic``: as in :func:`ring_attention`. ``group``: the
    ring, a ProcessGroup or 1-D DeviceMesh; None is the default group, or a ring of one without torch.distributed. Computes in x's
    dtype, whatever the dtype of the weights.

    ``rotary``: the position embedding as a record of :mod:`ring_attn_core.model.rotary`, with its scaling if it has one;
    ``rotary_base`` is short for ``Rotary(base)``, and None means no positions. ``qk_norm``: apply an :class:`RMSNorm` over
    head_dim with ``eps`` to q and k before the rotary embedding, as in Qwen3. ``qkv_bias``: q, k and v have biases, as in Qwen2.
    ``o_bias``: o has a bias, as in Llama with attention_bias. ``param_dtype``: the dtype of the weights, by name or as a
    torch.dtype.

    ``softcap``: scores become ``softcap tanh(score / softcap)``. ``sinks``: every head learns one logit in the softmax's
    denominator, the parameter ``sinks`` [heads], initially 0, in float32 unless ``param_dtype`` is float64. ``alibi``: add
    ``slope_h (k_pos - q_pos)`` in global positions to the scores, with the fixed slopes of
    :func:`~ring_attn_core.model.alibi.alibi_slopes`; usual with ``rotary_base=None``. ``dropout_rate``: fraction of the attention
    probabilities dropped by calls with a ``dropout_seed``; calls without one drop nothing.

    A rank's gradients of the weights are partial: sum them over the ranks with :func:`sum_gradients`. Raise ValueError if sizes
    do not fit, a number is outside its range, or ``deterministic`` is combined with a backend that is not deterministic.
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
        param_dtype: torch.dtype | str = "float32",
        group: dist.ProcessGroup | DeviceMesh | None = None,
        strategy: str = "auto",
        backend: str = "auto",
        deterministic: bool = False,
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
        check_vendor(options, differentiates_lse=False)
        super().__init__(config, options, group)
        self.first_head = 0  # the first of this rank's heads under tensor parallelism
        self.sinks = nn.Parameter(torch.zeros(heads, dtype=accumulation_dtype(self.q.weight.dtype))) if sinks else None

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        length: int | None = None,
        *,
        extents: Tensor | None = None,
        key_extents: Tensor | None = None,
        key_mask: Tensor | None = None,
        dropout_seed: int | Tensor | None = None,
        dropout_offset: tuple[int | Tensor, int | Tensor] = (0, 0),
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
        context_length: int | None = None,
    ) -> Tensor:
        """Apply attention to x [b s dim], this rank's shard in layout order; return [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the layout. ``length``: the
        true global number of tokens, if the shards hold padding. ``extents``, ``key_extents`` [b s 2], ``key_mask`` [b s]: as
        in ring_attention. ``dropout_seed``: an int or a 0-d integer tensor, the same on every rank and different at every step;
        dropout applies exactly if it is passed, whatever the value of ``self.training``. ``dropout_offset``: as in
        ring_attention.

        ``context`` [b t dim], sharded like x: cross-attention to this second sequence, which gives the keys and values.
        ``context_length``: its true number of tokens (None: all tokens of its shards). ``context_positions``: its positions.
        ``key_mask`` [b t], ``extents`` and the mask then refer to its tokens: if the queries see the whole context, make the
        layer with ``mask=full()``, and usually with ``rotary_base=None``.

        Raise ValueError if x or context has another shape, or if ring_attention refuses the call.
        """
        for name, given in (("context_positions", context_positions), ("context_length", context_length)):
            if given is not None and context is None:
                raise ValueError(f"{name} was given without context: pass the sequence that it is about, or positions and length")
        q, k, v = self.projected(x, positions, context, context_positions)
        slopes = self._slopes(q) if self.config.alibi else None
        sinks = None if self.sinks is None else local(self.sinks)
        offset = layer_offset(dropout_offset, 1, self.first_head) if self.first_head else dropout_offset
        dropout = None if dropout_seed is None else Dropout(dropout_seed, offset)
        rate = 0.0 if dropout_seed is None else self.config.dropout_rate
        kv_length = None if context is None else self._held(context.shape[1]) if context_length is None else context_length
        options = replace(self.options, length=length, kv_length=kv_length, dropout_rate=rate)
        arrays = Arrays(extents, key_mask, sinks, slopes, None, key_extents)
        out, _ = attention(q, k, v, arrays, dropout, options, group_name(self.group))
        return self.o(out.flatten(2))

    def _held(self, tokens: int) -> int:
        """Return the number of tokens on all ranks, each of which holds ``tokens``."""
        return tokens * ranks_of(ring_of(self.group))

    def _slopes(self, q: Tensor) -> Tensor:
        """Return the ALiBi slopes [heads] of q's heads on q's device, in float64 if q is float64, else in float32.

        They are made anew at each call, because ``.bfloat16()`` would round a buffer.
        """
        heads = torch.arange(self.first_head, self.first_head + q.shape[2], dtype=torch.float64, device=q.device)
        return alibi_slopes(self.config.heads, heads).to(accumulation_dtype(q.dtype))
