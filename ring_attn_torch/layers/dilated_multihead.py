"""A replacement for torch.nn.MultiheadAttention with dilated attention over a ring."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attn_core.constructor import takes
from ring_attn_core.problem.checks import check_dropout_rate
from ring_attn_core.problem.options import Options

from ..block import merge
from ..variants.dilated import dilated_attention
from .dense_mask import DenseMaskArguments
from .dilated import PatternArguments
from .multihead_base import CallOptions, MultiheadArguments, MultiheadBase


@dataclass(frozen=True, kw_only=True)
class DilatedMultiheadArguments(PatternArguments, MultiheadArguments):
    """The arguments of DilatedAttention."""


class DilatedAttention(MultiheadBase):
    """A replacement for ``torch.nn.MultiheadAttention`` with :func:`dilated_attention` on contiguous shards.

    Constructor, forward and state dict are torch's. The additional arguments ``segments``, ``dilations``, ``mixing``, ``group``,
    ``strategy``, ``backend`` and ``deterministic`` are as in :func:`dilated_attention`. With dilation 1 and one segment that
    covers the sequence, the module equals torch's, up to rounding and the differences below. A rank's gradients of the weights
    are partial: sum them over the ranks with :func:`sum_gradients`.

    Intended differences:
        - The call returns ``(out, None)``, also by default: the attention weights [tokens, tokens] are never materialized.
        - ``is_causal=True`` needs no ``attn_mask``. If one is passed too, it must be causal.
        - ``add_bias_kv`` and ``add_zero_attn`` add one key each. Every query sees such a key once, not once in each pattern.
        - If no key is added, the attention of a query that sees no key in any pattern is 0.

    Raise ValueError, which names the argument, on: ``need_weights=True``; ``dropout`` above 0; query and key of different
    lengths; nested tensors and DTensors; inputs of another dtype than the weights, except under autocast; a mask with numbers
    other than 0 and -inf; patterns that do not fit; anything that dilated_attention refuses. Raise it too on an ``attn_mask``
    that differs between heads, or is neither causal nor a sliding window. A mask of either kind may also hide some keys from all
    queries. Without ``is_causal``, raise it on every ``attn_mask`` under torch.compile, which hides the values.
    """

    @takes(DilatedMultiheadArguments)
    def __init__(self, arguments: DilatedMultiheadArguments) -> None:
        check_dropout_rate(arguments.dropout)
        _check_no_dropout(arguments.dropout)
        super().__init__(arguments)
        self.patterns = arguments.patterns(self.num_heads)

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
    ) -> tuple[Tensor, None]:
        """Apply attention to this rank's contiguous shards; return (out, None) with out shaped like query.

        ``query``: [tokens, batch, embed_dim], [batch, tokens, embed_dim] with batch_first, or [tokens, embed_dim]. ``key`` and
        ``value`` have the shape of ``query``, except for their kdim and vdim features.

        ``key_padding_mask`` [batch, tokens] or [tokens]: this rank's shard, True or -inf where a key is padding. ``attn_mask``
        [all tokens, all tokens] or [batch * heads, all tokens, all tokens]: the global mask, the same on every rank. Its values
        are read on the host, so for long sequences pass ``is_causal=True`` alone. ``length``: the global number of tokens without
        padding; None: the number of queries of ``attn_mask``, or without a mask all tokens of the shards.

        Raise ValueError before any array is sent if the class refuses an argument or shapes do not fit.
        """
        call_options = CallOptions(key_padding_mask, need_weights, attn_mask, is_causal, length, length)
        inputs, mask, options = self._taken((query, key, value), call_options)
        q, k, v = self._projected(*inputs)
        added = self.add_zero_attn or self.bias_k is not None
        called = self.patterns.keywords(options) | {"mask": mask.band, "key_mask": mask.key_mask, "length": options.length}
        out = dilated_attention(q, k, v, **called, group=self.ring.group, return_lse=added)
        if added:
            out, lse = out
            if self.add_zero_attn:  # a key of score 0 and value 0
                out, lse = merge((out, lse), (torch.zeros_like(out), torch.zeros_like(lse)))
            out = self._with_bias_kv(q, out, lse).to(q.dtype)
        return self._returned(out, query), None

    def _check(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool | None) -> None:
        _check_no_dropout(self.dropout)
        super()._check(query, key, value, need_weights)
        tokens = -2 if query.ndim == 2 or self.batch_first else 0
        if query.shape[tokens] != key.shape[tokens]:
            raise ValueError(
                f"query has {query.shape[tokens]} tokens and key {key.shape[tokens]}: the segments of dilated attention are of "
                "one sequence, so pass equally many; MultiheadAttention takes two sequences"
            )

    def _mask_of(self, q: Tensor, k: Tensor, call_options: CallOptions, options: Options) -> tuple[DenseMaskArguments, Options]:
        mask, options = super()._mask_of(q, k, call_options, options)
        if mask.extents is not None:
            raise ValueError(
                "attn_mask is not a band: dilated attention takes causal masks and sliding windows, and keys hidden from all "
                "queries beside them. Pass is_causal=True, or None, and padding as key_padding_mask"
            )
        return mask, options


def _check_no_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError(
            f"dropout={dropout}: dilated_attention drops no probabilities, for a query has several of them for one key, one in "
            "each pattern: pass dropout=0.0, and drop what comes out if need be"
        )
