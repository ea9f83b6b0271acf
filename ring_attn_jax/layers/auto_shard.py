"""Sharding of global sequences over a mesh, and gathering of global logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..axes import on_explicit_axes
from ..data.layout import from_layout, to_layout
from ..sharded import ShardedAxes
from .ring import LayerRing


class ShardedRows(NamedTuple):
    """The sharding of global sequences: the layout, the mesh axes, and the number of tokens in a batch row."""

    layout: str
    where: ShardedAxes
    length: int

    @classmethod
    def of(cls, ids: jax.Array, mask: jax.Array | None, ring: LayerRing) -> ShardedRows:
        """Return the ShardedRows of global sequences ``ids`` [batch, tokens]. ``ring`` must have a mesh."""
        check_global(ids, mask)
        where = ring.sharded
        assert where is not None
        members = math.prod(where.mesh.shape[axis] for axis in where.batch_axes)
        if ids.shape[0] % members:
            raise ValueError(f"ids have {ids.shape[0]} rows, which {members} members of the mesh cannot share equally: add rows")
        return cls(ring.layout, where, ids.shape[1])

    def shard(self, x: jax.Array) -> jax.Array:
        """Permute [batch, length] to layout order, pad it and shard it over the mesh: [batch, tokens]."""
        x, mesh = to_layout(jnp.asarray(x), self.layout, self.where.ranks), self.where.mesh
        spec = PartitionSpec(self.where.batch_axes or None, self.where.axis_name)
        if AxisType.Explicit in mesh.axis_types:
            return on_explicit_axes(x, mesh, spec)
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def shard_mask(self, mask: jax.Array | None) -> jax.Array | None:
        return None if mask is None else self.shard(mask)

    def unshard(self, x: jax.Array) -> jax.Array:
        """Permute [batch, tokens, features] back to natural order and drop the padding: [batch, length, features]."""
        return from_layout(x, self.layout, self.where.ranks, self.length)


def check_global(ids: Any, mask: Any) -> None:
    """Raise ValueError if ``ids`` are not integers [batch, tokens], or if ``mask`` is neither None nor bool of the same shape."""
    shape, dtype = getattr(ids, "shape", ()), getattr(ids, "dtype", None)
    if len(shape) != 2 or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        got = type(ids).__name__ if dtype is None else f"{dtype} {list(shape)}"
        raise ValueError(f"ids must be integers [batch, tokens], whole sequences in natural order, got {got}")
    if mask is not None and (str(getattr(mask, "dtype", "")) != "bool" or mask.shape != shape):
        got = f"{mask.dtype} {list(mask.shape)}" if hasattr(mask, "dtype") else type(mask).__name__
        raise ValueError(f"mask must be bool {list(shape)}, True for tokens and False for padding, got {got}")
