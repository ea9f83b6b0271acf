"""Summary attention, which is approximate, as a module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.model.rotary import Rotary
from ring_attn_core.variants.summary import SummaryOptions

from ..ring.groups import group_name, group_of, local, rank_in
from ..variants.summary import Inputs, attention_with_summaries
from .attention import ring_of
from .parts import Linear, RMSNorm, dtype_name
from .rotary import RotaryEmbedding


class SummaryAttention(nn.Module):
    """Approximate causal multi-head attention: ``o(summary_attention(rotary(q(x)), rotary(k(x)), v(x), pool))``.

    It stands in for :class:`RingAttention` where exact attention to the last tokens and to summaries of all blocks before them
    will do. ``block``, ``summaries``, ``window``, ``pooling``: as in :func:`summary_attention`, whose layout is contiguous. The
    parameter ``pool`` [summaries, kv_heads, head_dim] is 0 at first for one summary a block, its mean; more of them, which would
    stay equal, start normal. ``pooling="mean"`` has no such parameter. The other arguments are RingAttention's.

    A rank's gradients of the weights, ``pool`` among them, are its own part: sum them over the ranks, as :func:`sum_gradients`
    does. Raises ValueError for sizes that do not fit and numbers outside their range.
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
        super().__init__()
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
        self.group = group
        kept, size, turned = config.param_dtype, config.head_dim, config.rotary
        self.rotary = None if turned is None else RotaryEmbedding(size, turned.base, turned.scaling)
        self.q = Linear(dim, heads * size, qkv_bias, kept)
        self.k = Linear(dim, config.kv_heads * size, qkv_bias, kept)
        self.v = Linear(dim, config.kv_heads * size, qkv_bias, kept)
        self.o = Linear(heads * size, dim, False, kept)
        self.q_norm = RMSNorm(size, eps, kept) if qk_norm else None
        self.k_norm = RMSNorm(size, eps, kept) if qk_norm else None
        make = torch.zeros if summaries == 1 else torch.randn
        pool = make(summaries, config.kv_heads, size, dtype=getattr(torch, kept)) if pooling == "attention" else None
        self.pool = None if pool is None else nn.Parameter(pool)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, length: int | None = None, *, key_mask: Tensor | None = None
    ) -> Tensor:
        """x [b s dim], this rank's shard in contiguous layout -> [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the layout. ``length``: the
        true global number of tokens, where the shards hold padding. ``key_mask`` [b s]: as summary_attention's.

        Raises ValueError for an x of another shape, and what summary_attention raises.
        """
        if x.ndim != 3 or x.shape[-1] != self.config.dim:
            raise ValueError(f"x must be [batch, tokens, {self.config.dim}], got {list(x.shape)}")
        q, k, v = (project(x).unflatten(-1, (-1, self.config.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            positions = self.layout_positions(x.shape[1], x.device) if positions is None else positions
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        pool = None if self.pool is None else local(self.pool)
        inputs, options = Inputs(q, k, v, pool, key_mask), replace(self.options, length=length)
        out, _ = attention_with_summaries(inputs, options, group_name(self.group))
        return self.o(out.flatten(2))

    def layout_positions(self, tokens: int, device: torch.device | None = None) -> Tensor:
        """int32 [tokens]: the global positions of this rank's shard of ``tokens``, padding included."""
        return rank_in(ring_of(self.group)) * tokens + torch.arange(tokens, dtype=torch.int32, device=device)

    def __getstate__(self) -> dict[str, Any]:
        """With the group's name for the group, which can be neither copied nor pickled."""
        return self.__dict__ | {"group": None if self.group is None else group_name(self.group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self.group, str):
            self.group = group_of(self.group)
