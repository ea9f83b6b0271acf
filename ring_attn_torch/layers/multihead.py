"""A replacement for torch.nn.MultiheadAttention over a ring."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ring_attn_core.constructor import takes
from ring_attn_core.kernels.backends import check_vendor

from ..attend.dropout import Dropout
from ..call.autograd import attention
from ..call.prepare import Arrays
from ..ring.agreement import exchange
from ..ring.groups import group_name, ranks_of, ring_of
from .multihead_base import CallOptions, MultiheadArguments, MultiheadBase
from .ring import LayerRing


@dataclass(frozen=True, kw_only=True)
class RingMultiheadArguments(LayerRing, MultiheadArguments):
    """The arguments of MultiheadAttention."""


class MultiheadAttention(MultiheadBase):
    """``torch.nn.MultiheadAttention`` over a ring: the same constructor, forward and state dict, on shards of the sequence.

    ``group``, ``layout``, ``strategy``, ``order``, ``backend``, ``deterministic``: as in :func:`ring_attention`. All other
    arguments are torch's. A rank's gradients of the weights are partial: sum them over the ranks with :func:`sum_gradients`.

    Intended differences:
        - The call returns ``(out, None)``, also by default: the attention weights [tokens, tokens] are never materialized.
        - ``is_causal=True`` needs no ``attn_mask``. If one is passed too, it must be causal.
        - The attention of a query that sees no key is 0; torch returns NaN or 0, depending on its code path.
        - Dropout drops other probabilities than torch does. With the same seed it drops the same on any number of ranks.

    Raise ValueError, which names the argument, on: ``need_weights=True``; ``dropout=1``; ``add_bias_kv`` with dropout while
    training; nested tensors and DTensors; inputs of another dtype than the weights, except under autocast; a mask with numbers
    other than 0 and -inf; anything that ring_attention refuses. Raise it too on an ``attn_mask`` that differs between heads, or
    is neither a band (limits of query minus key position) nor one interval of keys per query. A mask of either kind may also hide
    some keys from all queries. With ``is_causal=True`` raise it on an ``attn_mask`` that is not causal. Without ``is_causal``,
    raise it on every ``attn_mask`` under torch.compile, which hides the values.
    """

    @takes(RingMultiheadArguments)
    def __init__(self, arguments: RingMultiheadArguments) -> None:
        super().__init__(arguments)
        check_vendor(self.options, differentiates_lse=arguments.add_bias_kv)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        length: int | None = None,
        kv_length: int | None = None,
        dropout_seed: int | Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Apply attention to this rank's shards in layout order; return (out, None) with out shaped like query.

        ``query``: [tokens, batch, embed_dim], [batch, tokens, embed_dim] with batch_first, or [tokens, embed_dim]. ``key`` and
        ``value`` have the same axes. Their number of tokens may differ from that of ``query``, and they have kdim and vdim
        features.

        ``key_padding_mask`` [batch, tokens of key] or [tokens of key]: this rank's shard, True or -inf where a key is padding.
        ``attn_mask`` [all queries, all keys] or [batch * heads, all queries, all keys]: the global mask in natural order, the
        same on every rank. Its values are read on the host, so for long sequences pass ``is_causal=True`` alone.

        ``length``, ``kv_length``: as in :func:`ring_attention`. If an ``attn_mask`` is passed, None stands for the mask's number
        of queries (``length``) or keys (``kv_length``). ``dropout_seed``: as in ring_attention. None: draw a seed from torch's
        generator; on several ranks, the first rank broadcasts its seed. Dropout applies only if ``self.training`` is True and
        ``dropout`` is above 0.

        Raise ValueError before any array is sent if the class refuses an argument or shapes do not fit.
        """
        call_options = CallOptions(key_padding_mask, need_weights, attn_mask, is_causal, length, kv_length)
        inputs, mask, options = self._taken((query, key, value), call_options)
        dropout = None
        if self.training and self.dropout:
            dropout = Dropout(self._seed() if dropout_seed is None else dropout_seed)
            options = replace(options, dropout_rate=self.dropout)
        q, k, v = self._projected(*inputs)
        sinks = torch.zeros(self.num_heads, device=q.device) if self.add_zero_attn else None  # a score of 0, without a value
        arrays = Arrays(mask.extents, mask.key_mask, sinks)
        out, lse = attention(q, k, v, arrays, dropout, replace(options, mask=mask.band), group_name(self.ring.group))
        return self._returned(self._with_bias_kv(q, out, lse), query), None

    def _check(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool | None) -> None:
        if self.training and self.dropout and self.bias_k is not None:
            raise ValueError(f"add_bias_kv with dropout={self.dropout} does not work while training: leave out one of the two")
        super()._check(query, key, value, need_weights)

    def _seed(self) -> int:
        """Draw a dropout seed from torch's generator. All ranks return the seed of the first rank."""
        seed, ring = int(torch.randint(2**31, ())), ring_of(self.ring.group)
        return seed if ring is None or ranks_of(ring) == 1 else exchange("dropout of MultiheadAttention", seed, ring)[0]
