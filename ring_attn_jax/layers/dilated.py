"""The DilatedRingAttention layer: projections, rotary embeddings and dilated attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from ring_attn_core.constructor import takes
from ring_attn_core.model.config import SparseConfig
from ring_attn_core.variants.dilated import Patterns

from ..variants.dilated import dilated_attention
from ..variants.sharded_dilated import sharded_dilated_attention
from .projections import Projections
from .ring import ContiguousRing, LayerArguments


@dataclass(frozen=True, kw_only=True)
class DilatedArguments(LayerArguments, ContiguousRing, SparseConfig):
    """The arguments of DilatedRingAttention."""

    segments: Sequence[int]
    dilations: Sequence[int]
    mixing: str = "softmax"


class DilatedRingAttention(Projections):
    """Multi-head dilated attention over a ring: ``o(dilated_attention(rotary(q(x)), rotary(k(x)), v(x)))``.

    It has the weights and arguments of :class:`RingAttention`, without ``layout`` (shards are contiguous), ``o_bias``, sinks,
    ALiBi and dropout. ``segments``, ``dilations``, ``mixing``: as in :func:`dilated_attention`. Pattern i splits the sequence
    into segments of ``segments[i]`` tokens. In each segment a head keeps every ``dilations[i]``-th token, and the kept tokens
    attend to each other (LongNet, arXiv:2307.02486). With dilation 1 and one segment that covers the sequence, the layer equals
    RingAttention up to rounding.

    ``axis_name``: the ring, a mesh axis of the shard_map that the layer is called in. With ``mesh`` the layer takes global arrays
    instead, sharded over the mesh. Its attention is then :func:`sharded_dilated_attention` with ``batch_axes`` and ``head_axis``.
    JAX sums the gradients of replicated weights over the ranks by itself, unless they are computed inside
    ``shard_map(check_vma=False)``. Raise ValueError if sizes or patterns do not fit, a number is outside its range, or the mesh
    lacks an axis.
    """

    @takes(DilatedArguments)
    def __init__(self, arguments: DilatedArguments) -> None:
        super().__init__(arguments, arguments.rngs)
        self.patterns = Patterns(arguments.segments, arguments.dilations, arguments.mixing).checked(self.config.heads)

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, length: int | None = None, *, key_mask: jax.Array | None = None
    ) -> jax.Array:
        """Apply attention to x [b s dim], this rank's contiguous shard (with a mesh: the global array); return [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the shard. ``length``: the
        global number of tokens without padding, if the shards hold padding. ``key_mask`` bool [b s]: True where a key may be
        attended.

        Raise ValueError if x has a wrong shape, or if dilated_attention refuses an argument.
        """

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            options = self.patterns.keywords(self.options) | {"length": length, "key_mask": key_mask}
            if (where := self.ring.sharded) is not None:
                return sharded_dilated_attention(q, k, v, **options, **where._asdict())
            return dilated_attention(q, k, v, **options, axis_name=self.ring.axis_name)

        return self.attended(attend, x, positions)
