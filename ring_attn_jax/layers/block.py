"""A block of a transformer: a mixer of tokens, usually attention, and an MLP, each after a norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx

from ring_attn_core.model.config import AttentionConfig, TransformerConfig
from ring_attn_core.model.mixers import Mamba2Config, check_mixers_order

from ..sharded import ShardedAxes
from .activations import Caller
from .attention import RingAttention
from .chunks import in_chunks
from .gated_delta_net import GatedDeltaNet
from .mamba2 import Mamba2
from .parts import LinearMap, RMSNorm
from .ring import LayerRing

Mixer = RingAttention | GatedDeltaNet | Mamba2


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202, equation 6): [b s dim] -> [b s dim], ``chunk`` tokens at a time.
    ``where``: the mesh axes of global arrays, so that each device chunks its own tokens."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        param_dtype: str = "float32",
        chunk: int | None = None,
        where: ShardedAxes | None = None,
        bias: bool = False,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.chunk, self.where = chunk, where
        self.gate = LinearMap(dim, hidden, bias, param_dtype, rngs=rngs)
        self.up = LinearMap(dim, hidden, bias, param_dtype, rngs=rngs)
        self.down = LinearMap(hidden, dim, bias, param_dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.chunk is None:
            return self._of(x)
        return _of_chunks(*nnx.split(self), x)

    def _of(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


@partial(jax.jit, static_argnums=0)  # else each call outside jit would compile the loop over chunks again
def _of_chunks(graph: Any, weights: Any, x: jax.Array) -> jax.Array:
    mlp = nnx.merge(graph, weights)
    return in_chunks(lambda weights, x: nnx.merge(graph, weights)._of(x), weights, x, mlp.chunk, mlp.where)


class Block(nnx.Module):
    """A pre-norm transformer block: ``x += attention(norm(x)); x += mlp(norm(x))``.

    ``attention``: a RingAttention, or a recurrent layer in its place. ``hidden``: features inside the MLP. ``mlp_chunk``: the
    most tokens that the MLP computes at a time; None for all.
    """

    def __init__(
        self, attention: Mixer, hidden: int, mlp_chunk: int | None = None, mlp_bias: bool = False, *, rngs: nnx.Rngs
    ) -> None:
        dim, eps, dtype = attention.config.dim, attention.config.eps, attention.config.param_dtype
        self.attention_norm = RMSNorm(dim, eps, dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(dim, eps, dtype)
        self.mlp = SwiGLU(dim, hidden, dtype, mlp_chunk, attention.ring.sharded, mlp_bias, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        length: int | None = None,
        *,
        call: Caller | None = None,
        **masks: Any,
    ) -> jax.Array:
        """Return the output for x [b s dim]. ``call``: a jax.checkpoint policy. ``masks``: keywords of RingAttention's call."""
        if call is not None:
            return call(lambda block, x: block(x, positions, length, **masks), self, x)
        mixer = self.attention
        if isinstance(mixer, GatedDeltaNet | Mamba2):
            return self.through(x, lambda x: mixer(x, length, extents=masks.get("extents"), layout=masks.get("layout")))
        return self.through(x, lambda x: mixer(x, positions, length, **masks))

    def through(self, x: jax.Array, attend: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Return the block's output for x [b s dim]. ``attend``: a function of the normed x that replaces the attention layer."""
        x = x + attend(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def mixer_of(config: TransformerConfig, layer: int, ring: LayerRing, rngs: nnx.Rngs) -> Mixer:
    sizes = config.mixer(layer)
    if isinstance(sizes, AttentionConfig):
        return RingAttention(**sizes.arguments, **vars(ring), rngs=rngs)
    kind = Mamba2 if isinstance(sizes, Mamba2Config) else GatedDeltaNet
    check_mixers_order(ring.order, kind.__name__)
    return kind(
        **vars(sizes), layout=ring.layout, axis_name=ring.axis_name, mesh=ring.mesh, batch_axes=ring.batch_axes, rngs=rngs
    )
