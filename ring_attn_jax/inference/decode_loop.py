"""The decode loop on the device: one program per step caches each unfinished request's newest token and draws its next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ring_attn_core.model.generation import Generation

from .cache import KVCache
from .forward import decoded, last_hidden, logits_of
from .rank_model import RankModel, Specs, specs_of
from .sampling import drawn

if TYPE_CHECKING:
    from ..layers.transformer import RingTransformer

Read = Callable[[], list[int]]
SAME = PartitionSpec()


class PlacedModel(NamedTuple):
    """A model on a mesh: its compiled programs, and its weights, which are the programs' first argument."""

    mesh: Mesh
    axis_name: str
    compiled: Programs
    weights: tuple[jax.Array, ...]

    @classmethod
    def of(cls, model: RingTransformer) -> PlacedModel:
        """Put a model's weights on its mesh. A model without a mesh becomes a ring of one rank on its device.

        Weights that are sharded over the mesh keep their sharding. All other weights are replicated.
        """
        from flax import nnx

        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        mesh, axis_name = model.ring.mesh, model.ring.axis_name
        if mesh is None:
            mesh = _alone(axis_name, next(iter(leaves[0].devices())))
        elif not isinstance(mesh, Mesh):
            raise ValueError("the model was made with an AbstractMesh, which has no devices: make it with a Mesh")
        specs = specs_of(leaves)
        weights = jax.device_put(tuple(leaves), tuple(NamedSharding(mesh, spec) for spec in specs))
        return cls(mesh, axis_name, programs(graph, tree, mesh, specs), weights)

    def put(self, x: Any) -> Any:
        """Replicate the arrays of a pytree on all devices of the mesh."""
        return jax.device_put(x, NamedSharding(self.mesh, SAME))


@lru_cache(maxsize=64)
def _alone(axis_name: str, device: Any) -> Mesh:
    return jax.make_mesh((1,), (axis_name,), axis_types=(AxisType.Auto,), devices=[device])


class Programs(NamedTuple):
    """The jitted programs of a model.

        prefill(weights, cache, hidden, chunk, fresh=, equal=) -> (hidden, cache)
        first(weights, cache, hidden, parameters, ends) -> newest
        step(weights, cache, newest, parameters, ends) -> (newest, cache)

    ``chunk``: (ids, lengths, mask of the prompts that end in it); their rows of ``hidden`` [requests, dim] become the last
    block's outputs. ``equal``: the tokens of every prompt if equal, else None. ``newest``: (tokens, finished). ``ends``: (stop
    ids, cached tokens at which each request ends).
    """

    prefill: Callable[..., Any]
    first: Callable[..., Any]
    step: Callable[..., Any]


@lru_cache(maxsize=16)
def programs(graph: Any, tree: Any, mesh: Mesh, specs: Specs) -> Programs:
    """Build the jitted programs of a model; another ``generate`` with the same sizes compiles nothing.

    ``graph``: the model without its arrays, from ``nnx.split``. ``tree``: the pytree structure whose leaves are the weights.
    """

    def model_of(weights: Sequence[jax.Array]) -> RankModel:
        return RankModel.of(graph, tree, weights, specs)

    def mapped(on_rank: Callable[..., Any], cache: KVCache) -> Callable[..., Any]:
        """Apply ``jax.shard_map`` to ``on_rank(weights, cache, inputs)`` -> (result, cache); inputs and result are replicated."""
        return jax.shard_map(on_rank, mesh=mesh, in_specs=(specs, cache.specs, SAME), out_specs=(SAME, cache.specs))

    @partial(jax.jit, static_argnames=("fresh", "equal"), donate_argnames="cache")
    def prefill(weights: Any, cache: KVCache, hidden: Any, chunk: Any, *, fresh: bool, equal: int | None) -> Any:
        """Prefill a chunk (ids, lengths, mask of the prompts that it completes). Return (hidden, cache). See ``Programs``."""

        def on_rank(weights: Any, cache: KVCache, inputs: Any) -> Any:
            hidden, (ids, lengths, ends) = inputs
            last, cache = last_hidden(model_of(weights), cache, ids, lengths if equal is None else equal, fresh, ids.shape[1])
            return jnp.where(ends[:, None], last, hidden), cache

        return mapped(on_rank, cache)(weights, cache, (hidden, chunk))

    @jax.jit
    def first(weights: Any, cache: KVCache, hidden: jax.Array, parameters: Any, ends: Any) -> Any:
        def on_rank(weights: Any, cache: KVCache, inputs: Any) -> Any:
            hidden, parameters, ends = inputs
            new = _drawn(logits_of(model_of(weights), hidden), cache, parameters)
            return (new, _ended(new, cache, ends)), cache

        return mapped(on_rank, cache)(weights, cache, (hidden, parameters, ends))[0]

    @partial(jax.jit, donate_argnames="cache")
    def step(weights: Any, cache: KVCache, newest: Any, parameters: Any, ends: Any) -> Any:
        def on_rank(weights: Any, cache: KVCache, inputs: Any) -> Any:
            (tokens, finished), parameters, ends = inputs
            logits, cache = decoded(model_of(weights), cache, (tokens[:, None], ~finished[:, None]))
            new = _drawn(logits[:, 0], cache, parameters)
            return (new, finished | _ended(new, cache, ends)), cache

        return mapped(on_rank, cache)(weights, cache, (newest, parameters, ends))

    return Programs(prefill, first, step)


def _drawn(logits: jax.Array, cache: KVCache, parameters: Any) -> jax.Array:
    return drawn(logits, parameters, jnp.arange(len(logits)), cache.lengths)


def _ended(tokens: jax.Array, cache: KVCache, ends: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return a mask [requests] of those that end now. ``ends``: (stop ids, number of cached tokens at which each ends)."""
    stop, lengths = ends
    return (tokens[:, None] == stop[None]).any(1) | (cache.lengths >= lengths)


class DecodeLoop:
    """The state of the decode loop: the cache, and each request's newest token.

    ``newest``: (tokens int32 [requests], finished bool [requests]: has drawn a stop id or its maximum number of new tokens).
    """

    def __init__(self, placed: PlacedModel, cache: KVCache, generation: Generation) -> None:
        self._placed, self.cache = placed, cache
        parameters = generation.sampling.parameters
        number = lambda x: None if x is None else np.asarray(x, jnp.result_type(type(x[0] if isinstance(x, list) else x)))
        parameters = parameters._replace(
            low=np.uint32(parameters.low), high=np.uint32(parameters.high), temperature=number(parameters.temperature)
        )
        parameters = parameters._replace(top_k=number(parameters.top_k), top_p=number(parameters.top_p))
        # -1 is no token: jaxlib 0.11.2 crashes for several GPUs if the program has an empty array
        ends = np.asarray(generation.stop or [-1], np.int32), np.asarray(generation.ends, np.int32)
        self._parameters, self._ends = placed.put(parameters), placed.put(ends)
        self.newest: tuple[jax.Array, jax.Array]
        self.ahead = placed.mesh.devices.flat[0].platform != "cpu"
        """True if the next step is launched before the host reads the newest tokens, so that the device works meanwhile."""

    def begin(self, hidden: jax.Array) -> None:
        """Draw the first new tokens from the prompts' last hidden states [requests, dim]."""
        self.newest = self._placed.compiled.first(self._placed.weights, self.cache, hidden, self._parameters, self._ends)

    def step(self) -> None:
        """Append the newest token of each unfinished request to the cache, and draw each request's next token."""
        inputs = self._placed.weights, self.cache, self.newest, self._parameters, self._ends
        self.newest, self.cache = self._placed.compiled.step(*inputs)

    def read(self) -> Read:
        """Start the copy of the newest tokens to the host. Return a function that waits for the copy and returns the tokens."""
        tokens = self.newest[0]
        tokens.copy_to_host_async()
        return lambda: np.asarray(tokens).tolist()
