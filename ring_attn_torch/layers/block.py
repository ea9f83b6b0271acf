"""A block of a transformer: a mixer of tokens, usually attention, and an MLP, each after a norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ring_attn_core.model.config import AttentionConfig, TransformerConfig
from ring_attn_core.model.mixers import Mamba2Config, check_mixers_order
from ring_attn_core.model.rotary import Rotary

from .activations import Caller
from .attention import RingAttention
from .chunks import in_chunks
from .gated_delta_net import GatedDeltaNet
from .mamba2 import Mamba2
from .parts import LinearMap, RMSNorm
from .projections import Attend
from .ring import LayerRing
from .rotary import Turns, shares_turns, turns_at

Mixer = RingAttention | GatedDeltaNet | Mamba2


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202, equation 6). ``chunk``: the most tokens computed at once; None: all."""

    def __init__(self, dim: int, hidden: int, param_dtype: str = "float32", chunk: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.chunk = chunk
        self.gate = LinearMap(dim, hidden, bias, param_dtype)
        self.up = LinearMap(dim, hidden, bias, param_dtype)
        self.down = LinearMap(hidden, dim, bias, param_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self._of(x) if self.chunk is None else in_chunks(self._of, x, self.chunk)

    def _of(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A pre-norm block: ``x += attention(norm(x)); x += mlp(norm(x))``. ``mlp_chunk``: the MLP's tokens at a time, None: all."""

    def __init__(self, attention: Mixer, hidden: int, mlp_chunk: int | None = None, mlp_bias: bool = False) -> None:
        super().__init__()
        dim, eps, dtype = attention.config.dim, attention.config.eps, attention.config.param_dtype
        self.attention_norm = RMSNorm(dim, eps, dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(dim, eps, dtype)
        self.mlp = SwiGLU(dim, hidden, dtype, mlp_chunk, mlp_bias)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, length: int | None = None, *, call: Caller | None = None, **masks: Any
    ) -> Tensor:
        """Return the output for x [b s dim]. ``call``: limits the saved tensors. ``masks``: keywords of RingAttention's call."""
        if call is not None:  # inside forward, so that hooks of the block, such as FSDP's, stay around it
            names = tuple(masks)  # torch.utils.checkpoint saves only positional tensors
            again = lambda x, positions, length, *each: self.forward(x, positions, length, **dict(zip(names, each, strict=True)))
            return call(again, x, positions, length, *masks.values())
        mixer = self.attention
        if isinstance(mixer, GatedDeltaNet | Mamba2):
            return self.through(x, lambda x: mixer(x, length, extents=masks.get("extents"), layout=masks.get("layout")))
        return self.through(x, lambda x: mixer(x, positions, length, **masks))

    def through(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the block's output for x [b s dim]. ``attend``: a function of the normed x that replaces the attention layer."""
        x = x + attend(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def over_cache(self, x: Tensor, positions: Tensor, attend: Attend, turns: dict[Rotary, Turns]) -> Tensor:
        """Return the output for x [b s dim], with ``attend(q, k, v)`` as attention. ``turns``: shared, extended by its own."""
        assert isinstance(self.attention, RingAttention), "recurrent layers have states instead"
        embedding = self.attention.rotary
        if shares_turns(embedding) and embedding.rotary not in turns:
            turns[embedding.rotary] = turns_at(positions, embedding, x.dtype)
        where = turns[embedding.rotary] if shares_turns(embedding) else positions
        return self.through(x, partial(self.attention.attended, attend, positions=where))


def mixer_of(config: TransformerConfig, layer: int, ring: LayerRing) -> Mixer:
    sizes = config.mixer(layer)
    if isinstance(sizes, AttentionConfig):
        return RingAttention(**sizes.arguments, **vars(ring))
    kind = Mamba2 if isinstance(sizes, Mamba2Config) else GatedDeltaNet
    check_mixers_order(ring.order, kind.__name__)
    return kind(**vars(sizes), layout=ring.layout, group=ring.group)
