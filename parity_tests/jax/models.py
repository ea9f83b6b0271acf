"""Runs the layers of parity_tests/models.py with flax.nnx, on a ring of host devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from parity_tests.jax.ring import SEQ, mesh_of
from parity_tests.models import LAYER, LENGTH, TRANSFORMER, Arrays
from ring_attn_jax import from_layout, shard_batch, to_layout
from ring_attn_jax.layers import RingAttention
from ring_attn_jax.state import from_numpy, to_numpy
from ring_attn_jax.transformer import RingTransformer, loss

REPLICATED = PartitionSpec()


def run_layer(weights: Arrays, x: np.ndarray, dout: np.ndarray, ranks: int, whole: bool = False, **sizes: Any) -> Arrays:
    """out, dx and the weights' gradients of RingAttention, in natural order; ``whole``: the layer builds the shard_map itself."""
    mesh = mesh_of(ranks)
    layer = RingAttention(**LAYER | sizes, mesh=mesh if whole else None, rngs=nnx.Rngs(0))
    graph, state = nnx.split(from_numpy(layer, weights), nnx.Param)
    there = lambda array: to_layout(jnp.asarray(array), layer.layout, ranks)
    back = lambda array: np.asarray(from_layout(array, layer.layout, ranks, LENGTH))

    def forward(state, x):
        return nnx.merge(graph, state)(x, length=LENGTH)

    @jax.jit
    def program(state, x, dout):
        sharded = forward if whole else jax.shard_map(forward, mesh=mesh, in_specs=(REPLICATED, SEQ), out_specs=SEQ)
        out, vjp = jax.vjp(sharded, state, x)
        return out, *vjp(dout)

    out, gradients, dx = program(state, there(x), there(dout))
    nnx.update(layer, gradients)
    return {"out": back(out), "dx": back(dx), **to_numpy(layer)}


@lru_cache(maxsize=8)
def transformer_step(ranks: int, layout: str, whole: bool = False, **sizes: Any) -> tuple[RingTransformer, Callable[..., Any]]:
    """A transformer, and ``step(parameters, ids, labels) -> (loss, logits), gradients`` on whole arrays in layout order."""
    mesh = mesh_of(ranks)
    model = RingTransformer(**TRANSFORMER | sizes, layout=layout, mesh=mesh if whole else None, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(model, nnx.Param)

    def objective(parameters, ids, labels):
        logits = nnx.merge(graph, parameters)(ids, length=LENGTH)
        return loss(logits, labels, axis_name=None if whole else "seq"), logits

    step = jax.value_and_grad(objective, has_aux=True)
    if not whole:
        step = jax.shard_map(step, mesh=mesh, in_specs=(REPLICATED, SEQ, SEQ), out_specs=((REPLICATED, SEQ), REPLICATED))
    return model, jax.jit(step)


def run_transformer(weights: Arrays, ids: np.ndarray, labels: np.ndarray, ranks: int, layout: str, **sizes: Any) -> Arrays:
    """Logits in natural order, the loss, and the gradients of every weight."""
    model, step = transformer_step(ranks, layout, **sizes)
    batch = shard_batch(jnp.asarray(ids), layout, ranks, labels=jnp.asarray(labels))
    parameters = nnx.state(from_numpy(model, weights), nnx.Param)
    (value, logits), gradients = step(parameters, batch.ids, batch.labels)
    nnx.update(model, gradients)
    return {"loss": np.asarray(value), "logits": np.asarray(from_layout(logits, layout, ranks, LENGTH)), **to_numpy(model)}
