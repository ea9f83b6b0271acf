"""The training in JAX: one process, each rank a CPU device of the host."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import P

from ring_attn_jax import DilatedRingAttention, RingAttention, SummaryAttention, from_numpy, loss, to_numpy
from ring_attn_jax.layers.block import SwiGLU
from ring_attn_jax.layers.parts import RMSNorm

from . import problem as recipe
from .problem import Problem

LAYERS = {"exact": RingAttention, "dilated": DilatedRingAttention, "summary": SummaryAttention}


class Block(nnx.Module):
    """A block ``x += attention(norm(x)); x += mlp(norm(x))`` with one of the three attentions."""

    def __init__(self, variant: str, rngs: nnx.Rngs) -> None:
        given: dict[str, Any] = {"layout": "contiguous"} if variant == "exact" else recipe.VARIANTS[variant]
        self.attention_norm = RMSNorm(recipe.DIM)
        self.attention = LAYERS[variant](recipe.DIM, recipe.HEADS, kv_heads=recipe.KV_HEADS, **given, rngs=rngs)
        self.mlp_norm = RMSNorm(recipe.DIM)
        self.mlp = SwiGLU(recipe.DIM, recipe.HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nnx.Module):
    """A language model, bytes [b s] -> logits [b s 256], with the head tied to the embedding."""

    def __init__(self, variant: str) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(256, recipe.DIM, rngs=rngs)
        self.blocks = nnx.List([Block(variant, rngs) for _ in range(recipe.DEPTH)])
        self.norm = RMSNorm(recipe.DIM)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def run(given: Problem, devices: int) -> dict[str, Any]:
    mesh = jax.make_mesh((given.ranks,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    model = Model(given.variant)
    from_numpy(model, recipe.first_weights(to_numpy(model)))
    graph, weights = nnx.split(model)
    b1, b2 = recipe.BETAS
    optimizer = optax.adamw(recipe.LEARNING_RATE, b1, b2, recipe.EPS, weight_decay=recipe.WEIGHT_DECAY)
    weights, state = jax.device_put((weights, optimizer.init(weights)), jax.NamedSharding(mesh, P()))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(None, "seq"), P(None, "seq")), out_specs=P())
    def loss_of(weights: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        return loss(nnx.merge(graph, weights)(ids), labels)

    @jax.jit
    def update(weights: Any, state: Any, ids: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss_of)(weights, ids, labels)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    losses, began = [], time.perf_counter()
    for step in range(given.steps):
        ids, labels = map(jnp.asarray, recipe.batch(step, given.tokens))
        weights, state, value = update(weights, state, ids, labels)
        losses.append(float(value))
    return {"losses": losses, "seconds": time.perf_counter() - began}
