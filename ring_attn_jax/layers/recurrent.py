"""The parts that GatedDeltaNet and Mamba2 share: constructor arguments, weights, and the call on a ring or a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ring_attn_core.constructor import extract
from ring_attn_core.model.mixers import first_decays
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.releases import warn_if_untried

from ..attend.tiles import accumulation_dtype
from ..axes import on_mesh
from ..call.traced import TracedLayout
from ..recurrence.runs import Layout
from ..sharded import ShardedAxes
from .parts import dtype_name
from .ring import LayerRing

Arrays = tuple[jax.Array, ...]
Where = dict[str, Any]
"""The keywords ``axis_name, layout, length, extents`` of a recurrence."""
Inner = Callable[..., jax.Array]
"""A convolution of (y, weight[, bias]), or a recurrence of its function's arrays in their order."""
Mix = Callable[[Any, Arrays, Arrays, Where], jax.Array]
"""A function ``mix(config, tokens, weights, where)`` of this rank's shards, whose result is one too."""


@dataclass(frozen=True, kw_only=True)
class RecurrentArguments(LayerRing):
    """The constructor arguments of both layers: ``dim`` and ``heads`` by position, a dtype in place of its name, the ring."""

    dim: int = field(kw_only=False)
    heads: int = field(kw_only=False)
    param_dtype: Any = "float32"
    rngs: nnx.Rngs
    head_axis: str | None = field(default=None, init=False)
    strategy: str = field(default="auto", init=False)
    order: str = field(default="ring", init=False)
    backend: str = field(default="auto", init=False)
    deterministic: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "param_dtype", dtype_name(self.param_dtype))


class Recurrent(nnx.Module):
    """The base of both layers: the ring, and the parameters ``conv1d``, ``dt_bias`` and ``A_log``."""

    _over_ring: ClassVar[Mix]
    _mix: ClassVar[Callable[..., jax.Array]]

    def __init__(self, arguments: RecurrentArguments, config: Any, conv_bias: bool) -> None:
        warn_if_untried("flax")
        self.config, self.ring = config, extract(LayerRing, arguments)
        self.conv1d = Taps(sum(config.parts), config.taps, conv_bias, config.param_dtype, rngs=arguments.rngs)
        wide = accumulation_dtype(jnp.dtype(config.param_dtype))
        decays = {name: nnx.Param(jnp.asarray(x, wide)) for name, x in first_decays(config.heads).items()}
        self.dt_bias, self.A_log = decays["dt_bias"], decays["A_log"]

    def __call__(
        self,
        x: jax.Array,
        length: int | None = None,
        *,
        extents: jax.Array | None = None,
        layout: BalancedLayout | TracedLayout | None = None,
    ) -> jax.Array:
        """Apply the layer to x [b s dim], this rank's shard in layout order (with a mesh: the global array); return [b s dim].

        ``length``: the global number of tokens without padding, if the shards hold padding. ``extents``: [b s 2], the shard of
        ``document_extents``; each document begins with the state 0. ``layout``: the ``.layout`` of a balanced shard. Raise
        ValueError if x has a wrong shape, or as the layer's recurrence does.
        """
        self.check(x)
        over = type(self)._over_ring
        return self.through(x, lambda tokens, weights: self.over_ring(over, tokens, weights, length, extents, layout))

    def mix(self, x: jax.Array, convolve: Inner, recur: Inner) -> jax.Array:
        return self.through(x, lambda tokens, weights: type(self)._mix(self.config, tokens, weights, convolve, recur))

    def through(self, x: jax.Array, mixed: Callable[[Arrays, Arrays], jax.Array]) -> jax.Array:
        """Return the layer's output for x [b s dim]. ``mixed(tokens, weights)``: the function between the projections."""
        raise NotImplementedError

    def check(self, x: jax.Array) -> None:
        """Raise ValueError if x is not [batch, tokens, dim], or without a mesh outside of a shard_map over the ring's axis."""
        if x.ndim != 3 or x.shape[-1] != self.config.dim:
            raise ValueError(f"x must be [batch, tokens, {self.config.dim}], got {list(x.shape)}")
        self.ring.check_axis(self)

    def over_ring(
        self,
        mix: Mix,
        tokens: Arrays,
        weights: Arrays,
        length: int | None,
        extents: jax.Array | None,
        layout: Layout | TracedLayout | None,
    ) -> jax.Array:
        """Return ``mix`` of this rank's shards, or with a mesh of the shards of each device. ``tokens``: [b s ...]."""
        if isinstance(layout, TracedLayout):
            raise ValueError(f"{type(self).__name__} takes a static layout: pass the shard's .layout")
        options = self.config, layout or self.ring.layout, length
        if self.ring.sharded is None:
            return _on_shards(mix, *options, self.ring.axis_name)(tokens, weights, extents)
        where = self.ring.sharded._replace(head_axis=None).seen_in(tokens[0])
        if tokens[0].shape[1] % where.ranks:
            raise ValueError(
                f"x has {tokens[0].shape[1]} tokens, which {where.ranks} members of the mesh cannot share equally: shard with "
                "to_layout, which pads, and pass length"
            )
        spec = PartitionSpec(where.batch_axes or None, where.axis_name)
        put = lambda x, spec: None if x is None else on_mesh(x, where.mesh, spec)
        placed = tuple(put(x, spec) for x in tokens), tuple(put(x, PartitionSpec()) for x in weights), put(extents, spec)
        return _on_mesh(mix, *options, where, extents is not None)(*placed)


def _on_shards(mix: Mix, config: Any, layout: Any, length: int | None, axis_name: str) -> Callable[..., jax.Array]:
    def mixed(tokens: Any, weights: Any, extents: jax.Array | None) -> jax.Array:
        return mix(config, tokens, weights, {"axis_name": axis_name, "layout": layout, "length": length, "extents": extents})

    return mixed


@lru_cache(maxsize=1024)
def _on_mesh(mix: Mix, config: Any, layout: Any, length: int | None, where: ShardedAxes, documents: bool) -> Any:
    """Return the jitted function of global arrays, cached, because each call outside jit would compile a new function."""
    spec = PartitionSpec(where.batch_axes or None, where.axis_name)
    in_specs = spec, PartitionSpec(), spec if documents else None
    mixed = _on_shards(mix, config, layout, length, where.axis_name)
    return jax.jit(jax.shard_map(mixed, mesh=where.mesh, in_specs=in_specs, out_specs=spec))


class Taps(nnx.Module):
    """The weights of a convolution of each channel alone, as torch.nn.Conv1d holds them: ``weight`` [channels, 1, taps], and
    ``bias`` or None. The weight is drawn from a normal distribution with standard deviation ``taps ** -0.5``."""

    def __init__(self, channels: int, taps: int, bias: bool, param_dtype: str, *, rngs: nnx.Rngs) -> None:
        init, dtype = nnx.initializers.normal(taps**-0.5), jnp.dtype(param_dtype)
        self.weight = nnx.Param(init(rngs.params(), (channels, 1, taps), dtype))
        self.bias = nnx.Param(jnp.zeros(channels, dtype)) if bias else None

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.weight[...][:, 0], *([] if self.bias is None else [self.bias[...]])
