"""A model inside shard_map, and its programs. If weights are sharded, each rank all-gathers them for one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ring_attn_core.model.config import TransformerConfig

from ..axes import sharded_like
from .cache import KVCache

Specs = tuple[PartitionSpec, ...]
Path = tuple[Any, ...]


class Decoder(Protocol):
    """The parts of a RingTransformer that inference uses; the layers, which stand above inference, import it."""

    config: TransformerConfig
    ring: Any
    compute_dtype: Any
    embed: Any
    blocks: Any
    norm: Any
    head: Any

    def embedded(self, ids: jax.Array) -> jax.Array: ...
    def logits(self, hidden: jax.Array) -> jax.Array: ...


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """A RingTransformer inside shard_map that computes this rank's tokens. ``specs``: the sharded weights' PartitionSpecs."""

    model: Decoder = field(kw_only=False)
    specs: Mapping[Path, PartitionSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Any, tree: Any, weights: Sequence[jax.Array], specs: Specs) -> RankModel:
        """Make the model from this rank's shards of the weights; it has no mesh, so its layers compute this rank's tokens."""
        from flax import nnx

        model: Any = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        model.ring = replace(model.ring, mesh=None)
        for block in model.blocks:
            block.attention.ring, block.mlp.where = model.ring, None
        by_path = nnx.to_flat_state(jax.tree.unflatten(tree, specs))
        return cls(model, specs={path: spec.get_value() for path, spec in by_path if any(spec.get_value())})

    @contextmanager
    def gathered(self, part: Path, after: jax.Array) -> Iterator[None]:
        """All-gather the weights of a part of the model, such as ("blocks", 0), for the time of the ``with`` block.

        The gathers wait for ``after``. Otherwise XLA could gather all layers at once, and a rank would hold the whole model.
        """
        from flax import nnx

        module: Any = self.model
        for name in part:
            module = module[name] if isinstance(name, int) else getattr(module, name)
        sharded = [
            (variable, self.specs[(*part, *path)])
            for path, variable in (nnx.iter_graph(module) if self.specs else ())
            if isinstance(variable, nnx.Variable) and (*part, *path) in self.specs
        ]
        shards = [variable.get_value() for variable, _ in sharded]
        if shards:
            _, ready = lax.optimization_barrier((after, shards))
            for (variable, spec), shard in zip(sharded, ready, strict=True):
                variable.set_value(_all_gathered(shard, spec))
        yield
        for (variable, _), shard in zip(sharded, shards, strict=True):
            variable.set_value(shard)


OnRank = Callable[[RankModel, KVCache, Any], tuple[Any, KVCache]]
"""A function ``on_rank(model, cache, new)`` -> (result, cache) inside shard_map; ``new`` and the result are replicated."""


@lru_cache(maxsize=64)
def program_of(function: OnRank, graph: Any, tree: Any, mesh: Any, specs: Specs, donate: bool = False) -> Any:
    """Return the jitted program ``program(weights, cache, new)`` of ``function`` for a model.

    ``graph``: the model without its arrays, from ``nnx.split``. ``tree``: the pytree structure whose leaves are the weights.
    ``specs``: their PartitionSpecs. ``donate``: the program overwrites the cache that it is passed.
    """
    same = PartitionSpec()

    def on_rank(weights: Any, cache: KVCache, new: Any) -> Any:
        return function(RankModel.of(graph, tree, weights, specs), cache, new)

    def program(weights: Any, cache: KVCache, new: Any) -> Any:
        in_specs = specs, cache.specs, same
        return jax.shard_map(on_rank, mesh=mesh, in_specs=in_specs, out_specs=(same, cache.specs))(weights, cache, new)

    return jax.jit(program, donate_argnums=1 if donate else ())


def _all_gathered(shard: jax.Array, spec: PartitionSpec) -> jax.Array:
    """All-gather a weight from the ranks' shards. Return the whole array, the same on every rank."""
    for dim, axes in enumerate(spec):
        if axes:
            shard = lax.all_gather(shard, axes, axis=dim, tiled=True, to="invarying")
    return shard


def specs_of(weights: Sequence[Any]) -> Specs:
    """Return the PartitionSpec of each weight. Under jit, a weight that is sharded over Auto axes counts as replicated."""
    return tuple(map(_spec_of, weights))


def _spec_of(x: Any) -> PartitionSpec:
    if isinstance(x, Tracer):
        return sharded_like(x)
    sharding = getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated else PartitionSpec()


def is_on(mesh: Any, x: Any) -> bool:
    """Return True if ``x`` is replicated, traced, not a JAX array, or sharded by a NamedSharding over ``mesh``."""
    sharding = getattr(x, "sharding", None)
    if isinstance(x, Tracer) or sharding is None or sharding.is_fully_replicated:
        return True
    if not isinstance(sharding, NamedSharding) or not isinstance(mesh, Mesh) or not isinstance(sharding.mesh, Mesh):
        return False
    own = sharding.mesh
    return own.axis_names == mesh.axis_names and own.devices.shape == mesh.devices.shape and (own.devices == mesh.devices).all()
