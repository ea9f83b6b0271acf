"""The base of the attention layers: projections, head norms, rotary embeddings and the ring."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ring_attn_core.constructor import extract
from ring_attn_core.model.config import AttentionConfig
from ring_attn_core.problem.options import Options

from ..ring.agreement import same_error
from ..ring.groups import ring_of
from .parts import LinearMap, RMSNorm
from .ring import LayerRing
from .rotary import RotaryEmbedding, Turns, shares_turns, turns_at

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function ``attend(q, k, v)`` that returns out [b s heads head_dim]."""


class Projections(nn.Module):
    """The base of attention layers: ``q``, ``k``, ``v``, ``o``; ``q_norm``, ``k_norm`` and ``rotary``, each perhaps None."""

    def __init__(self, arguments: AttentionConfig) -> None:
        super().__init__()
        self.config = config = extract(AttentionConfig, arguments)
        self.ring, self.options = extract(LayerRing, arguments), extract(Options, arguments)
        dtype, size, rotary = config.param_dtype, config.head_dim, config.rotary
        self.rotary = None if rotary is None else RotaryEmbedding(size, rotary.base, rotary.scaling)
        self.q = LinearMap(config.dim, config.heads * size, config.qkv_bias, dtype)
        self.k = LinearMap(config.dim, config.kv_heads * size, config.qkv_bias, dtype)
        self.v = LinearMap(config.dim, config.kv_heads * size, config.qkv_bias, dtype)
        self.o = LinearMap(config.heads * size, config.dim, config.o_bias, dtype)
        self.q_norm = RMSNorm(size, config.eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.eps, dtype) if config.qk_norm else None

    def attended(
        self,
        attend: Attend,
        x: Tensor,
        positions: Tensor | Turns | None,
        context: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """Return ``o(attend(q, k, v))`` [b s dim] for x [b s dim], after head norms and rotary embedding of q and k. ``context``
        [b t dim]: the source of keys and values. Positions of None: the layout's; without a context they may be shared Turns."""
        for name, value in (("x", x), ("context", context)):
            if value is not None and (value.ndim != 3 or value.shape[-1] != self.config.dim):
                with same_error(ring_of(self.ring.group)):
                    raise ValueError(f"{name} must be [batch, tokens, {self.config.dim}], got {list(value.shape)}")
        source = x if context is None else context
        heads = ((self.q, x), (self.k, source), (self.v, source))
        q, k, v = (project(inputs).unflatten(-1, (-1, self.config.head_dim)) for project, inputs in heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            where = self.ring.positions(x.shape[1], x.device) if positions is None else positions
            if context is None:
                k_where = where
            else:
                k_where = self.ring.positions(source.shape[1], x.device) if context_positions is None else context_positions
            with same_error(ring_of(self.ring.group)):
                if context is None and not isinstance(where, Turns) and shares_turns(self.rotary):
                    where = k_where = turns_at(where, self.rotary, q.dtype)
                q, k = self.rotary(q, where), self.rotary(k, k_where)
        return self.o(attend(q, k, v).flatten(2))
