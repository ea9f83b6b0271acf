"""The constructor arguments that layers and models share: the ring, the sizes and the dtype of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from ring_attn_core.plan.balanced_layout import BalancedLayout

from ..axes import ring_size
from ..call.traced import TracedLayout
from ..data.layout import _order, positions
from ..sharded import ShardedAxes
from .parts import dtype_name


@dataclass(frozen=True, kw_only=True)
class LayerRing:
    """The ring of a layer or model: arguments of ``ring_attention``, or with a ``mesh`` of ``sharded_ring_attention``."""

    layout: str = "zigzag"
    axis_name: str = "seq"
    mesh: Mesh | None = None
    batch_axes: str | Sequence[str] = ()
    head_axis: str | None = None
    strategy: str = "auto"
    order: str = "ring"
    backend: str = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        axes = (self.batch_axes,) if isinstance(self.batch_axes, str) else tuple(self.batch_axes)
        object.__setattr__(self, "batch_axes", axes)
        _ = self.sharded

    @property
    def sharded(self) -> ShardedAxes | None:
        """The mesh axes that shard global arrays. None without a mesh, that is, inside shard_map."""
        axes = self.axis_name, self.batch_axes, self.head_axis
        return None if self.mesh is None else ShardedAxes.of(self.mesh, *axes)

    def check_axis(self, caller: object) -> None:
        """Raise ValueError without a mesh outside of a shard_map over the ring's axis. ``caller``: the layer or model called."""
        if self.mesh is None:
            ring_size(self.axis_name, type(caller).__name__, "make it with mesh=mesh, and it takes global arrays")

    def positions(self, tokens: int, layout: BalancedLayout | TracedLayout | None = None) -> jax.Array:
        """Return the global positions, int32 [tokens], of this rank's shard, or with a mesh of all shards in layout order.

        A balanced layout knows its own number of tokens, so ``tokens`` is ignored.
        """
        where = self.sharded
        if isinstance(layout, BalancedLayout | TracedLayout):
            return _order(layout, layout.ranks, layout.length) if where else self._own(layout)
        if where is not None:
            held = jnp.concatenate([positions(layout or self.layout, where.ranks, tokens, rank) for rank in range(where.ranks)])
        else:
            ranks = ring_size(self.axis_name)
            held = positions(layout or self.layout, ranks, tokens * ranks, lax.axis_index(self.axis_name))
        return held[:tokens]  # ``held`` is longer if the layout cannot cut ``tokens`` equally, which ring_attention refuses

    def _own(self, layout: BalancedLayout | TracedLayout) -> jax.Array:
        return positions(layout, ring_size(self.axis_name), layout.length, lax.axis_index(self.axis_name))


@dataclass(frozen=True, kw_only=True)
class ContiguousRing(LayerRing):
    """The ring of a layer whose shards are contiguous."""

    layout: str = field(default="contiguous", init=False)
    order: str = field(default="ring", init=False)


@dataclass(frozen=True, kw_only=True)
class LayerArguments:
    """The constructor arguments of a layer: ``dim`` and ``heads`` also by position, and a dtype in place of its name."""

    dim: int = field(kw_only=False)
    heads: int = field(kw_only=False)
    kv_heads: int | None = None
    head_dim: int | None = None
    param_dtype: Any = "float32"
    rngs: nnx.Rngs

    def __post_init__(self) -> None:
        object.__setattr__(self, "param_dtype", dtype_name(self.param_dtype))
