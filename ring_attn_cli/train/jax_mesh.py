"""The mesh of a run in JAX, and shardings of weights over it, also for ``ring-attn generate``. Imported only if JAX is used."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .config import Config

AXES = "data", "seq"


def make_mesh(config: Config) -> Mesh:
    """Return the mesh ("data", "seq") of replicas x ranks devices, on CPUs if there are too few accelerators."""
    shape = config.ring.replicas, config.ring.ranks
    count = shape[0] * shape[1]
    devices = jax.devices()
    if jax.process_count() > 1 and len(devices) != count:
        raise ValueError(f"{jax.process_count()} processes have {len(devices)} devices, and [ring] {count}: change [ring]")
    if len(devices) < count:
        devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(f"the config has {count} ranks in all, and jax {len(devices)} devices: change [ring]")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices[:count])


def weight_shardings(state: Any, mesh: Mesh, sharded: bool) -> Any:
    """Return the tree ``state`` with each array replaced by its sharding; replicated unless ``sharded``.
    ``sharded``: over all axes, along the first dimension that is a multiple of the devices; an array without one is
    replicated."""

    def shard(x: Any) -> NamedSharding:
        divided = [i for i, size in enumerate(x.shape) if sharded and size and size % mesh.size == 0]
        return NamedSharding(mesh, PartitionSpec(*[None] * divided[0], mesh.axis_names) if divided else PartitionSpec())

    return jax.tree.map(shard, state)


def place(module: nnx.Pytree, mesh: Mesh, sharded: bool) -> None:
    state = nnx.state(module)
    nnx.update(module, jax.device_put(state, weight_shardings(state, mesh, sharded)))
