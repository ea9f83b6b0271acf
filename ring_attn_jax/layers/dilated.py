"""Dilated attention as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from ring_attn_core.masks import causal
from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.model.rotary import Rotary
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band
from ring_attn_core.variants.dilated import Patterns

from ..sharded import ShardedAxes
from ..variants.dilated import dilated_attention
from ..variants.sharded_dilated import sharded_dilated_attention
from .parts import dtype_name
from .projections import Projections


class DilatedRingAttention(Projections):
    """Multi-head dilated attention over a ring: ``o(dilated_attention(rotary(q(x)), rotary(k(x)), v(x)))``.

    The weights and their names are those of :class:`RingAttention`, and so are the arguments except ``segments``, ``dilations``
    and ``mixing``, which are those of :func:`dilated_attention`: pattern i lets a token attend, within its segment of
    ``segments[i]`` tokens, to every ``dilations[i]``-th one (LongNet, arXiv:2307.02486). Shards are contiguous. With one segment
    that covers the sequence, of dilation 1, it is RingAttention. It has neither sinks nor ALiBi nor dropout.

    ``axis_name``: the ring, a mesh axis of the shard_map that the layer is called in. With ``mesh`` the layer takes global arrays
    instead, sharded over the mesh, and calls :func:`sharded_dilated_attention` with ``batch_axes`` and ``head_axis``. JAX sums
    the gradients of replicated weights over the ranks by itself. Raise ValueError if sizes or patterns do not fit, or a number is
    outside its range.
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
            eps=eps,
            softcap=softcap,
            param_dtype=dtype_name(param_dtype),
        )
        patterns = Patterns(segments, dilations, mixing).checked(heads)
        options = Options(
            layout="contiguous", mask=mask, softcap=softcap, strategy=strategy, backend=backend, deterministic=deterministic
        )
        where = axis_name if mesh is None else ShardedAxes.of(mesh, axis_name, batch_axes, head_axis)
        super().__init__(config, options, where, rngs)
        self.patterns = patterns

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, length: int | None = None, *, key_mask: jax.Array | None = None
    ) -> jax.Array:
        """Attend over x [b s dim], this rank's contiguous shard (with a mesh: the global array); return [b s dim].

        ``positions``: int [s] or [b s], global positions for the rotary embedding; None: those of the shard. ``length``: the
        global number of tokens without padding, if the shards hold padding. ``key_mask`` bool [b s]: True if a key may be
        attended.

        Raise ValueError if the shape of x does not fit, or dilated_attention refuses an argument.
        """
        q, k, v = self.projected(x, positions)
        options = self.options
        arguments: dict[str, Any] = {
            **self.patterns._asdict(),
            "mask": options.mask,
            "key_mask": key_mask,
            "softcap": options.softcap,
            "length": length,
            "strategy": options.strategy,
            "backend": options.backend,
            "deterministic": options.deterministic,
        }
        if isinstance(self.where, ShardedAxes):
            out = sharded_dilated_attention(q, k, v, **arguments, **self.where._asdict())
        else:
            out = dilated_attention(q, k, v, axis_name=self.where, **arguments)
        return self.o(out.reshape(*x.shape[:2], -1))
