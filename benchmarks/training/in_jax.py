"""The steps in JAX: one process, weights sharded over an Explicit mesh of all GPUs, which also form the ring."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import NamedSharding, P

from ring_attn_jax import RingTransformer, loss

from ..support.rank import timed
from .problem import CLIP, LEARNING_RATE, Problem, config_of

OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": False}
"""With that scheduler, offloaded activations stay on the device: docs/checkpointing.md."""


@partial(jax.jit, static_argnums=(0, 1))
def _drawn(shape: tuple[int, ...], sharding: NamedSharding, seed: jax.Array) -> jax.Array:
    """Draw a weight, with each device drawing its own shard."""
    drawn = jnp.ones(shape) if len(shape) == 1 else 0.02 * jax.random.normal(jax.random.key(seed), shape)
    return jax.sharding.reshard(drawn, sharding)


def made(problem: Problem, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """Return the model's structure and its weights, each sharded along its first dimension."""
    model = lambda: RingTransformer.from_config(config_of(problem), mesh=mesh, activations=problem.activations, rngs=nnx.Rngs(0))
    graph, state = nnx.split(nnx.eval_shape(model))
    leaves, structure = jax.tree.flatten(state)
    sharding = NamedSharding(mesh, P("seq"))
    return graph, jax.tree.unflatten(structure, [_drawn(x.shape, sharding, jnp.uint32(i)) for i, x in enumerate(leaves)])


def run(problem: Problem, devices: int) -> dict[str, Any]:
    mesh = jax.make_mesh((devices,), ("seq",))
    jax.set_mesh(mesh)
    graph, weights = made(problem, mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE))
    there = NamedSharding(mesh, P(None, "seq"))
    draw = lambda seed: jax.random.randint(jax.random.key(seed), (1, problem.tokens * devices), 0, config_of(problem).vocab)
    ids, labels = (jax.device_put(draw(seed), there) for seed in range(2))

    def objective(weights: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        model = nnx.merge(graph, weights)
        hidden = model(ids, return_hidden=True)
        return loss(hidden, labels, head=model.head_weight, chunk=problem.loss_chunk, axis_name="seq", mesh=mesh)

    @partial(jax.jit, donate_argnums=(0, 1), compiler_options=None if problem.tiny else OPTIONS)
    def step(weights: Any, state: Any, ids: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(objective)(weights, ids, labels)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    state = jax.jit(optimizer.init)(weights)

    def one() -> float:
        nonlocal weights, state
        weights, state, value = jax.block_until_ready(step(weights, state, ids, labels))
        return float(value)

    found = timed(one, problem.steps)
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(of.get("peak_bytes_in_use", 0) for of in statistics)
    return found | {"peak": peak}
