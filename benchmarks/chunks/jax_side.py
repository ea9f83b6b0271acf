"""The compiled calls in JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ring_attn_jax import RingTransformer, loss

from .problem import VOCAB, config_of
from .torch_side import Cell


def cell(part: str, tokens: int, chunk: int | None) -> Cell:
    function, arguments = _loss(tokens, chunk) if part == "loss" else _layers(part, tokens, chunk)
    compiled = jax.jit(function).lower(*arguments).compile()
    plan: Any = compiled.memory_analysis()
    return Cell(partial(compiled, *arguments), lambda: plan.temp_size_in_bytes + plan.output_size_in_bytes)


def _drawn(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _layers(part: str, tokens: int, chunk: int | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    config = config_of(chunk)
    mesh = jax.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
    jax.set_mesh(mesh)
    activations = part.partition(", ")[2] or "keep"
    model = RingTransformer.from_config(config, mesh=mesh, activations=activations, rngs=nnx.Rngs(0))
    there = jax.NamedSharding(mesh, jax.P(None, "seq"))
    x, dout = (jax.device_put(_drawn(seed, 1, tokens, config.dim), there) for seed in range(2))
    if part == "mlp":
        graph, weights = nnx.split(model.blocks[0].mlp)
        of = lambda weights, x, dout: jax.vjp(lambda weights, x: nnx.merge(graph, weights)(x), weights, x)[1](dout)
        return of, (weights, x, dout)
    graph, weights, rest = nnx.split(model, lambda path, _: "blocks" in path, ...)
    ids = jax.device_put(jax.random.randint(jax.random.key(0), (1, tokens), 0, config.vocab), there)

    def gradients(weights: Any, rest: Any, ids: jax.Array, dout: jax.Array) -> Any:
        return jax.vjp(lambda weights: nnx.merge(graph, weights, rest)(ids, return_hidden=True), weights)[1](dout)

    return gradients, (weights, rest, ids, dout)


def _loss(tokens: int, chunk: int | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    hidden = _drawn(0, 1, tokens, config_of(None).dim)
    head = 0.02 * jax.random.normal(jax.random.key(1), (VOCAB, hidden.shape[-1]))
    labels = jax.random.randint(jax.random.key(2), (1, tokens), 0, VOCAB)

    def value(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        if chunk is None:
            return loss(hidden @ head.astype(hidden.dtype).T, labels, axis_name=None)
        return loss(hidden, labels, head=head, chunk=chunk, axis_name=None)

    return jax.grad(value, (0, 1)), (hidden, head, labels)
