"""The DilatedRingAttention layer: projections, rotary embeddings and dilated attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ring_attn_core.constructor import takes
from ring_attn_core.model.config import SparseConfig
from ring_attn_core.variants.dilated import Patterns

from ..variants.dilated import dilated_attention
from .projections import Projections
from .ring import ContiguousRing, LayerArguments


@dataclass(frozen=True, kw_only=True)
class PatternArguments(ContiguousRing):
    segments: Sequence[int]
    dilations: Sequence[int]
    mixing: str = "softmax"

    def patterns(self, heads: int) -> Patterns:
        return Patterns(self.segments, self.dilations, self.mixing).checked(heads)


@dataclass(frozen=True, kw_only=True)
class DilatedArguments(LayerArguments, PatternArguments, SparseConfig):
    """The arguments of DilatedRingAttention."""


class DilatedRingAttention(Projections):
    """Multi-head dilated attention over a ring: ``o(dilated_attention(rotary(q(x)), rotary(k(x)), v(x)))``.

    It has the weights and arguments of :class:`RingAttention`, without ``layout`` (shards are contiguous), ``o_bias``, sinks,
    ALiBi and dropout. ``segments``, ``dilations``, ``mixing``: as in :func:`dilated_attention`. Pattern i splits the sequence
    into segments of ``segments[i]`` tokens. In each segment a head keeps every ``dilations[i]``-th token, and the kept tokens
    attend to each other (LongNet, arXiv:2307.02486). With dilation 1 and one segment that covers the sequence, the layer equals
    RingAttention up to rounding.

    A rank's gradients of the weights are partial: sum them over the ranks with :func:`sum_gradients`. Raise ValueError if sizes
    or patterns do not fit, or if a number is outside its range.
    """

    @takes(DilatedArguments)
    def __init__(self, arguments: DilatedArguments) -> None:
        super().__init__(arguments)
        self.patterns = arguments.patterns(self.config.heads)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, length: int | None = None, *, key_mask: Tensor | None = None
    ) -> Tensor:
        """Apply attention to x [b s dim], this rank's contiguous shard; return [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the shard. ``length``: the
        global number of tokens without padding, if the shards hold padding. ``key_mask`` bool [b s]: True where a key may be
        attended.

        Raise ValueError if x has a wrong shape, or if dilated_attention refuses an argument.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = self.patterns.keywords(self.options)
            return dilated_attention(q, k, v, **options, group=self.ring.group, length=length, key_mask=key_mask)

        return self.attended(attend, x, positions)
