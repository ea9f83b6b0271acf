"""The decode loop on the device: one program per step caches each unfinished request's newest token and draws its next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ring_attn_core.model.generation import Generation

from .cache import KVCache
from .forward import decode_tokens, last_hidden, logits_of
from .rank_model import Decoder, OnRank, RankModel, program_of, specs_of
from .sampling import draw

Read = Callable[[], list[int]]


class PlacedModel(NamedTuple):
    """A model on a mesh: its weights, and from ``nnx.split`` the model without arrays and the structure of its arrays."""

    mesh: Mesh
    axis_name: str
    graph: Any
    tree: Any
    weights: tuple[jax.Array, ...]

    @classmethod
    def of(cls, model: Decoder) -> PlacedModel:
        """Put a model on its mesh, else on a ring of its device. Sharded weights stay so; others are replicated."""
        from flax import nnx

        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        mesh, axis_name = model.ring.mesh, model.ring.axis_name
        if mesh is None:
            mesh = _alone(axis_name, next(iter(leaves[0].devices())))
        elif not isinstance(mesh, Mesh):
            raise ValueError("the model was made with an AbstractMesh, which has no devices: make it with a Mesh")
        weights = jax.device_put(tuple(leaves), tuple(NamedSharding(mesh, spec) for spec in specs_of(leaves)))
        return cls(mesh, axis_name, graph, tree, weights)

    def program(self, function: OnRank) -> Any:
        """Return the program ``program(weights, cache, new)`` of ``function``; a later ``generate`` of equal sizes reuses it."""
        return program_of(function, self.graph, self.tree, self.mesh, specs_of(self.weights), donate=True)

    def put(self, x: Any) -> Any:
        return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec()))


@lru_cache(maxsize=64)
def _alone(axis_name: str, device: Any) -> Mesh:
    return jax.make_mesh((1,), (axis_name,), axis_types=(AxisType.Auto,), devices=[device])


@dataclass(frozen=True)
class Prefilled:
    """The prefill of a chunk. ``equal``: the tokens of every prompt if equal, else None. ``fresh``: the cache is empty."""

    equal: int | None
    fresh: bool

    def __call__(self, model: RankModel, cache: KVCache, new: Any) -> Any:
        """Return ``hidden`` [requests, dim] with the last outputs of the prompts that end, and the cache."""
        hidden, (ids, lengths, ends) = new
        last, cache = last_hidden(model, cache, ids, lengths if self.equal is None else self.equal, self.fresh, ids.shape[1])
        return jnp.where(ends[:, None], last, hidden), cache


def first(model: RankModel, cache: KVCache, new: Any) -> Any:
    """Return the first new tokens and which requests are finished, and the cache. ``new``: (hidden, parameters, ends)."""
    hidden, parameters, ends = new
    tokens = _draw(logits_of(model, hidden), cache, parameters)
    return (tokens, _find_ended(tokens, cache, ends)), cache


def step(model: RankModel, cache: KVCache, new: Any) -> Any:
    """Return the next (tokens, finished) and the cache. ``new``: ((tokens, finished), parameters, ends)."""
    (tokens, finished), parameters, ends = new
    logits, cache = decode_tokens(model, cache, (tokens[:, None], ~finished[:, None]))
    tokens = _draw(logits[:, 0], cache, parameters)
    return (tokens, finished | _find_ended(tokens, cache, ends)), cache


def _draw(logits: jax.Array, cache: KVCache, parameters: Any) -> jax.Array:
    return draw(logits, parameters, jnp.arange(len(logits)), cache.lengths)


def _find_ended(tokens: jax.Array, cache: KVCache, ends: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return a mask [requests] of those that end now. ``ends``: (stop ids, number of cached tokens at which each ends)."""
    stop, lengths = ends
    return (tokens[:, None] == stop[None]).any(1) | (cache.lengths >= lengths)


class DecodeLoop:
    """The state of the decode loop: the cache, and each request's newest token.

    ``newest``: (tokens int32 [requests], finished bool [requests]: has drawn a stop id or its maximum number of new tokens).
    """

    def __init__(self, placed: PlacedModel, cache: KVCache, generation: Generation) -> None:
        self._weights, self.cache = placed.weights, cache
        self._first, self._step = placed.program(first), placed.program(step)
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
        self._run(self._first, hidden)

    def step(self) -> None:
        """Append the newest token of each unfinished request to the cache, and draw each request's next token."""
        self._run(self._step, self.newest)

    def _run(self, program: Any, new: Any) -> None:
        self.newest, self.cache = program(self._weights, self.cache, (new, self._parameters, self._ends))

    def read(self) -> Read:
        """Start the copy of the newest tokens to the host. Return a function that waits for the copy and returns the tokens."""
        tokens = self.newest[0]
        tokens.copy_to_host_async()
        return lambda: np.asarray(tokens).tolist()
