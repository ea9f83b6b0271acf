"""A transformer in JAX whose MLPs and loss run in chunks: the gradients of the whole, in the memory of a chunk."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_jax import RingTransformer, from_numpy, loss, shard_batch, to_numpy
from ring_attn_jax.layers.block import SwiGLU
from ring_attn_jax.sharded import ShardedAxes

from ..support.models import LENGTH, TRANSFORMER, assert_near, token_data, token_ids, transformer_weights
from ..support.selection import first
from .models import REPLICATED, run_transformer
from .ring import AS_USERS, SEQ, mesh_of


@pytest.mark.exhaustive
def test_on_a_mesh_with_explicit_axes_every_device_cuts_its_own_tokens():
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    ids, labels = token_ids()
    sizes: dict[str, Any] = {"tied": False, "depth": 1}
    expected = run_transformer(1, "striped", token_data(), **sizes)
    with jax.set_mesh(mesh):
        whole: dict[str, Any] = {"mesh": mesh, "batch_axes": "data"}
        model = RingTransformer(**TRANSFORMER | sizes, **whole, mlp_chunk=4, layout="striped", rngs=nnx.Rngs(0))
        from_numpy(model, transformer_weights(**sizes))
        batch = shard_batch(jnp.asarray(ids), "striped", 2, labels=jnp.asarray(labels))
        there = NamedSharding(mesh, PartitionSpec("data", "seq"))

        @nnx.jit
        def step(model, ids, labels):
            def objective(model):
                hidden = model(ids, length=LENGTH, return_hidden=True)
                return loss(hidden, labels, head=model.head_weight, chunk=7, **whole)

            return nnx.value_and_grad(objective)(model)

        value, gradients = step(model, jax.device_put(batch.ids, there), jax.device_put(batch.labels, there))
    nnx.update(model, gradients)
    got = {"loss": np.asarray(value), **to_numpy(model)}
    assert_near(got, {name: x for name, x in expected.items() if name != "logits"}, 1e-5)


def test_an_mlp_in_chunks_holds_what_one_chunk_needs():
    tokens, dim, hidden = 1024, 8, 512
    bytes_of = {}
    for chunk in (None, 64):
        graph, weights = nnx.split(SwiGLU(dim, hidden, chunk=chunk, rngs=nnx.Rngs(0)))
        objective = lambda weights, x, graph=graph: nnx.merge(graph, weights)(x).sum()
        step = jax.jit(jax.grad(objective, (0, 1))).lower(weights, jax.ShapeDtypeStruct((1, tokens, dim), jnp.float32))
        analysis: Any = step.compile(compiler_options=AS_USERS).memory_analysis()
        bytes_of[chunk] = analysis.temp_size_in_bytes
    inside = tokens * hidden * 4
    assert bytes_of[None] >= 2 * inside
    assert bytes_of[64] <= 8 * inside / 16 + 8 * (tokens + hidden) * dim * 4


def products(jaxpr: Any, hidden: int) -> int:
    """Count the matrix products with an MLP's ``hidden`` features that a program runs, in loops as often as these."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            count += any(hidden in x.aval.shape for x in equation.invars)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        inner = (getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program))
        count += times * sum(products(x, hidden) for x in inner if hasattr(x, "eqns"))
    return count


def is_program(x: Any) -> bool:
    return hasattr(x, "jaxpr") or hasattr(x, "eqns")


FORWARD, AGAIN, BACKWARD = 3, 2, 6
"""Products of an MLP: gate, up and down; of these the backward needs the first two again; two gradients of each."""


@pytest.mark.parametrize("activations", first(["offload", "recompute", "keep"]))
def test_an_mlp_is_computed_again_once_in_chunks_or_not_in_a_block_that_is_computed_again_too(activations):
    for whole, chunk, chunks in ((False, None, 1), (False, 4, 3), (True, 4, 3)):
        mesh = mesh_of(4)
        sizes: dict[str, Any] = TRANSFORMER | {"depth": 1, "hidden": 56, "mlp_chunk": chunk, "activations": activations}
        model = RingTransformer(**sizes, layout="striped", mesh=mesh if whole else None, rngs=nnx.Rngs(0))
        graph, state = nnx.split(model, nnx.Param)
        hidden = lambda state, ids, graph=graph: nnx.merge(graph, state)(ids, length=LENGTH, return_hidden=True)
        if not whole:
            hidden = jax.shard_map(hidden, mesh=mesh, in_specs=(REPLICATED, SEQ), out_specs=SEQ)
        ids = shard_batch(jnp.asarray(token_ids()[0]), "striped", 4).ids
        program = jax.make_jaxpr(jax.grad(lambda state, ids, hidden=hidden: hidden(state, ids).sum()))(state, ids)
        again = 0 if activations == "keep" and chunk is None else AGAIN
        assert products(program.jaxpr, 56) == chunks * (FORWARD + again + BACKWARD), (whole, chunk)


def test_outside_jit_a_repeated_call_of_a_chunked_mlp_compiles_nothing():
    mlp = SwiGLU(8, 16, chunk=3, where=ShardedAxes.of(mesh_of(2), "seq", (), None), rngs=nnx.Rngs(0))
    x = jnp.ones((2, 16, 8))
    mlp(x)
    with jax.no_tracing():
        mlp(x)
