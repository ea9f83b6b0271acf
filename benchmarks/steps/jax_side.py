"""The steps in JAX: one program on a mesh of four devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ring_attn_jax import RingTransformer, from_numpy, loss, shard_batch, to_numpy

from .recipe import BETAS, CHUNK, CLIP, DECAY, EPS, LEARNING_RATE, LENGTH, Recipe, batch

WAYS = {"JAX, a ring of 4": (1, 4), "JAX, FSDP over 2 x a ring of 2": (2, 2)}
"""Mesh sizes (fsdp, seq): fsdp shards the batch and the weights, seq the sequence."""


def mesh_of(way: str) -> Mesh:
    return jax.make_mesh(WAYS[way], ("fsdp", "seq"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def made(recipe: Recipe, mesh: Mesh) -> RingTransformer:
    """Build the model with its initial weights, matrices sharded over fsdp."""
    model = RingTransformer.from_config(recipe.config, mesh=mesh, batch_axes="fsdp", rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(partial(_placed, mesh=mesh), nnx.state(model, nnx.Param)))
    return from_numpy(model, recipe.weights(to_numpy(model)))


def train(recipe: Recipe, model: RingTransformer, mesh: Mesh) -> dict[str, list[float]]:
    """Train and return the loss of each step and its gradient norm before clipping."""
    optimizer = nnx.Optimizer(model, optimizer_of(recipe), wrt=nnx.Param)
    nnx.update(optimizer, jax.tree.map(partial(_placed, mesh=mesh), nnx.state(optimizer)))
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    for step in range(recipe.steps):
        value, norm = _step(model, optimizer, sharded(step, mesh), jnp.asarray(step), mesh)
        found["losses"].append(float(value))
        found["norms"].append(float(norm))
    return found


def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    rate = LEARNING_RATE[recipe.optimizer]
    if recipe.optimizer == "sgd":
        return optax.sgd(rate)
    return optax.adamw(rate, *BETAS, eps=EPS, weight_decay=DECAY)


def sharded(step: int, mesh: Mesh) -> dict[str, jax.Array]:
    """Return the arrays of ``shard_batch`` that this training needs by name, in layout order on the devices."""
    whole: dict[str, Any] = {name: jnp.asarray(x) for name, x in batch(step).items()}
    shard = shard_batch(layout="zigzag", ranks=mesh.shape["seq"], **whole)
    there = NamedSharding(mesh, PartitionSpec("fsdp", "seq"))
    return {name: jax.device_put(getattr(shard, name), there) for name in ("ids", "labels", "positions", "extents", "key_mask")}


@partial(nnx.jit, static_argnames=("mesh",))
def _step(model: RingTransformer, optimizer: nnx.Optimizer, data: dict[str, jax.Array], seed: jax.Array, mesh: Mesh) -> Any:
    inputs: dict[str, Any] = {name: x for name, x in data.items() if name != "labels"}

    def objective(model: RingTransformer) -> jax.Array:
        hidden = model(**inputs, length=LENGTH, dropout_seed=seed, return_hidden=True)
        return loss(hidden, data["labels"], head=model.head_weight, chunk=CHUNK, mesh=mesh, batch_axes="fsdp")

    value, gradients = nnx.value_and_grad(objective)(model)
    norm = optax.tree.norm(gradients)
    share = jnp.minimum(CLIP / (norm + 1e-6), 1.0)  # as in torch's clip_grad_norm_
    optimizer.update(model, jax.tree.map(lambda gradient: gradient * share, gradients))
    return value, norm


def _placed(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Shard matrices over fsdp and replicate everything else."""
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp") if x.ndim > 1 else PartitionSpec()))
