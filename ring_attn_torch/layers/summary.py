"""Summary attention, an approximation, as a module."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.model.rotary import Rotary
from ring_attn_core.problem.options import Options
from ring_attn_core.variants.summary import SummaryOptions

from ..ring.groups import group_name, local
from ..variants.summary import SummaryInputs, attention_with_summaries
from .parts import dtype_name
from .projections import Projections


class SummaryAttention(Projections):
    """Approximate causal multi-head attention: ``o(summary_attention(rotary(q(x)), rotary(k(x)), v(x), pool))``.

    Use it in place of :class:`RingAttention` when exact attention to the last tokens, plus summaries of all blocks before them,
    is enough. ``block``, ``summaries``, ``window``, ``pooling``: as in :func:`summary_attention`, whose layout is contiguous. The
    parameter ``pool`` [summaries, kv_heads, head_dim] is initially 0 for one summary per block, which is then the block's mean;
    several summaries would stay equal, so they are initialized normally. ``pooling="mean"`` has no such parameter. The other
    arguments are RingAttention's.

    A rank's gradients of the weights, ``pool`` included, are partial: sum them over the ranks with :func:`sum_gradients`. Raise
    ValueError if sizes do not fit or a number is outside its range.
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
        super().__init__(config, Options(layout="contiguous", softcap=softcap), group)
        self.of_summaries = of_summaries
        make = torch.zeros if summaries == 1 else torch.randn
        pool = (
            make(summaries, config.kv_heads, config.head_dim, dtype=getattr(torch, config.param_dtype))
            if pooling == "attention"
            else None
        )
        self.pool = None if pool is None else nn.Parameter(pool)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, length: int | None = None, *, key_mask: Tensor | None = None
    ) -> Tensor:
        """Apply attention to x [b s dim], this rank's shard in contiguous layout; return [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the layout. ``length``: the
        true global number of tokens, if the shards hold padding. ``key_mask`` [b s]: as in summary_attention.

        Raise ValueError if x has another shape, or if summary_attention refuses the call.
        """
        q, k, v = self.projected(x, positions)
        pool = None if self.pool is None else local(self.pool)
        inputs, options = SummaryInputs(q, k, v, pool, key_mask), replace(self.of_summaries, length=length)
        out, _ = attention_with_summaries(inputs, options, group_name(self.group))
        return self.o(out.flatten(2))
