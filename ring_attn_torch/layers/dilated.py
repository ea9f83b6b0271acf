"""Dilated attention as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.masks import causal
from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.model.rotary import Rotary
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band
from ring_attn_core.variants.dilated import Patterns

from ..variants.dilated import dilated_attention
from .parts import dtype_name
from .projections import Projections


class DilatedRingAttention(Projections):
    """Multi-head dilated attention over a ring: ``o(dilated_attention(rotary(q(x)), rotary(k(x)), v(x)))``.

    The weights, their names and the arguments are those of :class:`RingAttention`, except ``segments``, ``dilations`` and
    ``mixing``, which are those of :func:`dilated_attention`: in pattern i a token attends, within its segment of ``segments[i]``
    tokens, to every ``dilations[i]``-th token (LongNet, arXiv:2307.02486). Shards are contiguous. With one segment that covers
    the sequence and dilation 1, it equals RingAttention. Sinks, ALiBi and dropout are not supported.

    A rank's gradients of the weights are partial: sum them over the ranks with :func:`sum_gradients`. Raise ValueError if sizes
    or patterns do not fit, or if a number is outside its range.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        segments: Sequence[int],
        dilations: Sequence[int],
        mixing: str = "softmax",
        kv_heads: int | None = None,
        head_dim: int | None = None,
        mask: Band = causal(),
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
            mask=mask,
            rotary_base=rotary_base,
            rotary=rotary,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            eps=eps,
            softcap=softcap,
            param_dtype=dtype_name(param_dtype),
        )
        patterns = Patterns(segments, dilations, mixing).checked(heads)
        options = Options(
            layout="contiguous", mask=mask, softcap=softcap, strategy=strategy, backend=backend, deterministic=deterministic
        )
        super().__init__(config, options, group)
        self.patterns = patterns

    def forward(
        self, x: Tensor, positions: Tensor | None = None, length: int | None = None, *, key_mask: Tensor | None = None
    ) -> Tensor:
        """Apply attention to x [b s dim], this rank's contiguous shard; return [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the shard. ``length``: the true
        global number of tokens, if the shards hold padding. ``key_mask`` bool [b s]: True where a key may be attended.

        Raise ValueError if x has another shape, or if dilated_attention refuses the call.
        """
        q, k, v = self.projected(x, positions)
        options = self.options
        out = dilated_attention(
            q,
            k,
            v,
            **self.patterns._asdict(),
            group=self.group,
            mask=options.mask,
            key_mask=key_mask,
            softcap=options.softcap,
            length=length,
            strategy=options.strategy,
            backend=options.backend,
            deterministic=options.deterministic,
        )
        return self.o(out.flatten(2))
