"""Runs the layers of parity_tests/support/models.py with flax.nnx, on a ring of host devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ring_attn_jax import from_layout, shard_batch, to_layout
from ring_attn_jax.layers.attention import RingAttention
from ring_attn_jax.layers.dilated import DilatedRingAttention
from ring_attn_jax.layers.summary import SummaryAttention
from ring_attn_jax.layers.transformer import RingTransformer
from ring_attn_jax.training.loss import loss
from ring_attn_jax.training.weights import from_numpy, to_numpy

from ..support.models import LAYER, LENGTH, TRANSFORMER, Arrays, made_and_called, transformer_weights
from .ring import SEQ, mesh_of

REPLICATED = PartitionSpec()


def run_layer(
    weights: Arrays, x: np.ndarray, dout: np.ndarray, ranks: int, arguments: dict[str, Any], whole: bool = False
) -> Arrays:
    """out, dx and the weights' gradients of RingAttention, in natural order; ``whole``: the layer builds the shard_map itself.

    With ``segments`` among the arguments it is a DilatedRingAttention, with ``summaries`` a SummaryAttention. With a ``context``
    there is dcontext too.
    """
    mesh = mesh_of(ranks)
    made, called = made_and_called(arguments)
    kind = DilatedRingAttention if "segments" in made else SummaryAttention if "summaries" in made else RingAttention
    layer = kind(**LAYER | made, mesh=mesh if whole else None, rngs=nnx.Rngs(0))
    graph, state = nnx.split(from_numpy(layer, weights), nnx.Param)
    layout = "contiguous" if isinstance(layer, SummaryAttention) else layer.options.layout
    there = lambda array: to_layout(jnp.asarray(array), layout, ranks)
    back = lambda array, length: np.asarray(from_layout(array, layout, ranks, length))
    leaves = {"x": x} | {name: called.pop(name) for name in ("context",) if name in called}
    arrays = {name: there(x) for name, x in called.items() if isinstance(x, np.ndarray)}
    numbers = {name: x for name, x in called.items() if name not in arrays}

    def forward(state, leaves, arrays):
        return nnx.merge(graph, state)(**leaves, length=LENGTH, **arrays, **numbers)

    @jax.jit
    def program(state, leaves, arrays, dout):
        sharded = forward if whole else jax.shard_map(forward, mesh=mesh, in_specs=(REPLICATED, SEQ, SEQ), out_specs=SEQ)
        out, vjp = jax.vjp(lambda state, leaves: sharded(state, leaves, arrays), state, leaves)
        return out, *vjp(dout)

    out, gradients, of_leaves = program(state, {name: there(leaf) for name, leaf in leaves.items()}, arrays, there(dout))
    nnx.update(layer, gradients)
    named = {f"d{name}": back(of_leaves[name], leaf.shape[1]) for name, leaf in leaves.items()}
    return {"out": back(out, LENGTH), **named, **to_numpy(layer)}


@lru_cache(maxsize=8)
def transformer_step(
    ranks: int, layout: str, length: int = LENGTH, whole: bool = False, chunk: int | None = None, **sizes: Any
) -> tuple[RingTransformer, Callable[..., Any]]:
    """A transformer, and ``step(parameters, data, seed) -> (loss, logits), gradients``.

    ``data``: what ``sharded`` gives, in layout order; ``seed`` of dropout, None for no dropout. ``chunk``: that of the loss of
    hidden states, None for one of logits.
    """
    mesh = mesh_of(ranks)
    model = RingTransformer(**TRANSFORMER | sizes, layout=layout, mesh=mesh if whole else None, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(model, nnx.Param)

    def objective(parameters, data, seed):
        inputs = {name: x for name, x in data.items() if name != "labels"}
        model, axis = nnx.merge(graph, parameters), None if whole else "seq"
        out = model(**inputs, length=length, dropout_seed=seed, return_hidden=chunk is not None)
        if chunk is None:
            return loss(out, data["labels"], axis_name=axis), out
        value = loss(out, data["labels"], head=model.head_weight, chunk=chunk, axis_name=axis)
        return value, out @ model.head_weight.T

    step = jax.value_and_grad(objective, has_aux=True)
    if not whole:
        specs = (REPLICATED, SEQ, REPLICATED), ((REPLICATED, SEQ), REPLICATED)
        step = jax.shard_map(step, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    return model, jax.jit(step)


def loaded(model: RingTransformer, weights: Arrays, ranks: int) -> nnx.State:
    """The parameters of ``model`` where a step leaves them, on every rank: its next call compiles nothing."""
    return jax.device_put(nnx.state(from_numpy(model, weights), nnx.Param), NamedSharding(mesh_of(ranks), REPLICATED))


def sharded(ranks: int, layout: str, **data: np.ndarray) -> dict[str, jax.Array]:
    """The arrays of shard_batch, which takes ``data``, by name."""
    arrays: dict[str, Any] = {name: jnp.asarray(x) for name, x in data.items()}
    batch = shard_batch(layout=layout, ranks=ranks, **arrays)
    return {name: x for name, x in batch._asdict().items() if isinstance(x, jax.Array)}


def run_transformer(
    ranks: int, layout: str, data: Arrays, seed: int | None = None, chunk: int | None = None, **sizes: Any
) -> Arrays:
    """Logits in natural order, the loss, and the gradients of every weight; ``data``: what shard_batch takes."""
    length = data["ids"].shape[1]
    model, step = transformer_step(ranks, layout, length, chunk=chunk, **sizes)
    parameters = loaded(model, transformer_weights(**sizes), ranks)
    (value, logits), gradients = step(parameters, sharded(ranks, layout, **data), seed)
    nnx.update(model, gradients)
    return {"loss": np.asarray(value), "logits": np.asarray(from_layout(logits, layout, ranks, length)), **to_numpy(model)}
