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
from ring_attn_core.plan.balanced_layout import BalancedLayout

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
    """``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202, equation 6): [b s dim] -> [b s dim]. ``chunk``: the maximum number of
    tokens computed at a time, which the backward recomputes; None: all, and nothing is recomputed."""

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
    """A pre-norm transformer block: ``x += attention(norm(x)); x += mlp(norm(x))``. ``attention``: a RingAttention, or a
    recurrent layer in its place. ``mlp_chunk``: the maximum number of tokens that the MLP computes at a time; None for all."""

    def __init__(self, attention: Mixer, hidden: int, mlp_chunk: int | None = None, mlp_bias: bool = False) -> None:
        super().__init__()
        dim, eps, dtype = attention.config.dim, attention.config.eps, attention.config.param_dtype
        self.attention_norm = RMSNorm(dim, eps, dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(dim, eps, dtype)
        self.mlp = SwiGLU(dim, hidden, dtype, mlp_chunk, mlp_bias)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        length: int | None = None,
        *,
        extents: Tensor | None = None,
        key_extents: Tensor | None = None,
        key_mask: Tensor | None = None,
        longest_path: int | None = None,
        layout: BalancedLayout | None = None,
        dropout_seed: int | Tensor | None = None,
        dropout_offset: tuple[int | Tensor, int | Tensor] = (0, 0),
        call: Caller | None = None,
    ) -> Tensor:
        """Apply the block to x [b s dim]; return [b s dim]. ``call``: a ``Caller`` that limits the tensors saved for the
        backward; None: save all."""
        if call is not None:  # inside forward, so that hooks of the block, such as FSDP's, stay around it
            arrays = extents, key_extents, key_mask, longest_path, layout, dropout_seed, dropout_offset
            return call(self._again, x, positions, length, *arrays)
        masks: dict[str, Any] = {"extents": extents, "key_extents": key_extents, "key_mask": key_mask}
        masks |= {"longest_path": longest_path, "layout": layout}
        dropout: dict[str, Any] = {"dropout_seed": dropout_seed, "dropout_offset": dropout_offset}
        mixer = self.attention
        if isinstance(mixer, GatedDeltaNet | Mamba2):
            return self.through(x, lambda x: mixer(x, length, extents=extents, layout=layout))
        return self.through(x, lambda x: mixer(x, positions, length, **masks, **dropout))

    def through(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the block's output for x [b s dim]. ``attend``: a function of the normed x that replaces the attention layer."""
        x = x + attend(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def over_cache(self, x: Tensor, positions: Tensor, attend: Attend, turns: dict[Rotary, Turns]) -> Tensor:
        """Return the block's output for x [b s dim] with ``attend(q, k, v)`` as attention.

        ``turns``: those of earlier blocks at ``positions``, extended by the block's own. Computing turns takes a few dozen
        kernels, about the time of a short product.
        """
        assert isinstance(self.attention, RingAttention), "a model with recurrent layers has no cache"
        embedding = self.attention.rotary
        if shares_turns(embedding) and embedding.rotary not in turns:
            turns[embedding.rotary] = turns_at(positions, embedding, x.dtype)
        where = turns[embedding.rotary] if shares_turns(embedding) else positions
        return self.through(x, partial(self.attention.attended, attend, positions=where))

    def _again(self, x: Tensor, positions: Any, length: Any, *arrays: Tensor | int | tuple[Any, Any] | None) -> Tensor:
        """Call ``forward``. All arguments are positional here, because torch.utils.checkpoint saves only positional tensors."""
        names = "extents", "key_extents", "key_mask", "longest_path", "layout", "dropout_seed", "dropout_offset"
        named: dict[str, Any] = dict(zip(names, arrays, strict=True))
        return self.forward(x, positions, length, **named)


def mixer_of(config: TransformerConfig, layer: int, ring: LayerRing) -> Mixer:
    """Make the mixer of layer ``layer`` of a model."""
    sizes = config.mixer(layer)
    if isinstance(sizes, AttentionConfig):
        return RingAttention(**sizes.arguments, **vars(ring))
    kind = Mamba2 if isinstance(sizes, Mamba2Config) else GatedDeltaNet
    check_mixers_order(ring.order, kind.__name__)
    return kind(**vars(sizes), layout=ring.layout, group=ring.group)
