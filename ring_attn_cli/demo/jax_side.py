"""The demo in JAX: one process, each rank a CPU device of the host. Imported in that process only."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ring_attn_core.reference.oracle import Attention
from ring_attn_jax import RingTransformer, from_layout, from_numpy, loss, shard_batch, sharded_ring_attention, to_layout, to_numpy

from ..processes import Report
from . import training
from .exactness import DemoInputs, DemoResult
from .settings import MASK, DemoSettings
from .training import DemoStep


def work(report: Report, settings: DemoSettings, given: DemoInputs) -> None:
    """Compute the attention and the training of all ranks, in one JAX program."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings.ranks)
    mesh = Mesh(np.array(jax.devices()), ("seq",))
    alone = Mesh(np.array(jax.devices()[:1]), ("seq",))

    report("stage", "attention over the ring")
    began = time.perf_counter()
    report("ring", DemoResult(attention(settings, given, mesh), time.perf_counter() - began))
    report("stage", "attention on one device")
    began = time.perf_counter()
    report("one device", DemoResult(attention(settings, given, alone), time.perf_counter() - began))
    report("stage", "training, first compiled")
    train(report, settings, mesh)


def attention(settings: DemoSettings, given: DemoInputs, mesh: Mesh) -> Attention:
    """Return attention and gradients of global sequences: shard, call, run the backward, and gather."""
    ranks, layout, tokens = mesh.size, settings.layout, settings.tokens

    @jax.jit
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, dout, dlse = (to_layout(x, layout, ranks) for x in arrays)
        ring = partial(sharded_ring_attention, mesh=mesh, layout=layout, mask=MASK, length=tokens, return_lse=True)
        (out, lse), backward = jax.vjp(ring, q, k, v)
        return tuple(from_layout(x, layout, ranks, tokens) for x in (out, lse, *backward((dout, dlse))))

    return Attention(*map(np.asarray, run(*map(jnp.asarray, given))))


def train(report: Report, settings: DemoSettings, mesh: Mesh) -> None:
    """Train on consecutive stretches of text, one for each step, and report each loss."""
    model = RingTransformer(**training.MODEL, layout=settings.layout, mask=MASK, rngs=nnx.Rngs(0))
    from_numpy(model, training.weights(to_numpy(model)))
    graph, weights = nnx.split(model)
    b1, b2 = training.BETAS
    optimizer = optax.adamw(training.LEARNING_RATE, b1, b2, training.EPS, weight_decay=training.WEIGHT_DECAY)
    # Replicated from the start, like the results of the first update; otherwise the second update compiles again.
    weights, state = jax.device_put((weights, optimizer.init(weights)), NamedSharding(mesh, PartitionSpec()))
    tokens = PartitionSpec(None, "seq")

    @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), tokens, tokens, tokens), out_specs=PartitionSpec())
    def loss_of(weights: Any, ids: jax.Array, positions: jax.Array, labels: jax.Array) -> jax.Array:
        return loss(nnx.merge(graph, weights)(ids, positions, settings.tokens), labels)

    @jax.jit
    def update(weights: Any, state: Any, ids: jax.Array, positions: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss_of)(weights, ids, positions, labels)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    for step in range(settings.steps):
        began = time.perf_counter()
        text = jnp.asarray(training.batch(step, settings.tokens))
        shards = shard_batch(text, settings.layout, settings.ranks)
        weights, state, value = update(weights, state, shards.ids, shards.positions, shards.labels)
        report("step", DemoStep(float(value), time.perf_counter() - began))
