"""Generation in JAX: one process over all of its GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ring_attn_jax import RingTransformer

from .problem import Problem, config_of, prompt_of
from .watch import Watch


def made(problem: Problem, mesh: jax.sharding.Mesh) -> RingTransformer:
    """Build the model with random weights, replicated on each device."""
    make = lambda: RingTransformer.from_config(config_of(problem), mesh=mesh, rngs=nnx.Rngs(0))
    graph, state = nnx.split(nnx.eval_shape(make))
    leaves, structure = jax.tree.flatten(state)
    whole = jax.NamedSharding(mesh, jax.P())

    def draw(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.ones(shape, dtype) if len(shape) == 1 else 0.02 * jax.random.normal(jax.random.key(seed), shape, dtype)

    drawn = jax.jit(draw, static_argnums=(1, 2), out_shardings=whole)
    return nnx.merge(graph, jax.tree.unflatten(structure, [drawn(i, x.shape, x.dtype) for i, x in enumerate(leaves)]))


def run(problem: Problem, devices: int) -> dict[str, Any]:
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    model = made(problem, mesh)
    prompt = prompt_of(problem, problem.tokens)
    model.generate([prompt], 4, chunk=problem.chunk)  # compile the programs of the call below
    watch = Watch()
    tokens = model.generate([prompt], problem.new, chunk=problem.chunk, on_token=watch.on_token, progress=watch.progress)
    peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices())
    return watch.found() | {"tokens": tokens[0], "peak": peak}
