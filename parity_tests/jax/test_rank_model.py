"""Generation with weights that are sharded over the ring: the tokens of replicated weights, in a part of their memory."""

# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from ring_attn_cli.train.jax_mesh import AXES, weight_shardings
from ring_attn_core.model.generation import Generation
from ring_attn_jax import KVCache, RingTransformer, decode_step, from_numpy, prefill_prompts
from ring_attn_jax.inference.decode_loop import DecodeLoop, PlacedModel, Prefilled, step

from ..support.generation import FIRST, PROMPTS, made, weights_of
from ..support.selection import first


def sharded(model: Any) -> Any:
    """Shard the weights of a model in place, as a run with ``ring.weights = "sharded"`` does. Return it."""
    state = nnx.state(model)
    nnx.update(model, jax.device_put(state, weight_shardings(state, model.ring.mesh, sharded=True)))
    return model


def mesh_of(replicas: int, ranks: int) -> Mesh:
    """Return a mesh as ``ring-attn train`` makes it."""
    return jax.make_mesh((replicas, ranks), AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: replicas * ranks])


def model_of(name: str, replicas: int, ranks: int) -> Any:
    made_with: dict[str, Any] = made(name, "float32") | {"mesh": mesh_of(replicas, ranks)}
    return from_numpy(RingTransformer(**made_with, rngs=nnx.Rngs(0)), weights_of(name))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "chunk"), first([("grouped", (1, 2), None), ("features", (2, 2), 8), ("grouped", (1, 4), None)], 1, 2)
)
def test_sharded_weights_generate_the_tokens_of_replicated_ones_to_the_bit(name, mesh, chunk, monkeypatch):
    caches: list[KVCache] = []

    class Kept(DecodeLoop):
        def step(self) -> None:
            super().step()
            caches.append(jax.tree.map(np.asarray, self.cache))

    monkeypatch.setattr("ring_attn_jax.inference.generate.DecodeLoop", Kept)
    models = model_of(name, *mesh), sharded(model_of(name, *mesh))
    assert sum(not x.is_fully_replicated for x in jax.tree.leaves(nnx.state(models[1]))) > 10
    whole, split = (model.generate(PROMPTS, 4, chunk=chunk, temperature=1.0) for model in models)
    assert split == whole
    steps = len(caches) // 2
    assert steps == 3
    for one, other in zip(caches[:steps], caches[steps:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.exhaustive
def test_a_rank_holds_its_shards_and_one_layer():
    model = sharded(RingTransformer(64, 64, 3, 2, mesh=mesh_of(1, 2), rngs=nnx.Rngs(0)))
    size = lambda module: sum(x.nbytes for x in jax.tree.leaves(nnx.state(module)))
    layer, whole = size(model.blocks[0]), size(model)
    placed, batch = PlacedModel.of(model), 1
    cache = KVCache.make(model.config, batch, 8, dtype="float32", mesh=model.ring.mesh)
    hidden, lengths, ends = np.zeros((batch, 64), np.float32), np.full(batch, 4, np.int32), np.ones(batch, bool)
    prompt = placed.put((np.zeros((batch, 4), np.int32), lengths, ends))
    greedy: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "seed": 0,
        "stop": (),
        "chunk": None,
        "cache_dtype": None,
    }
    loop = DecodeLoop(placed, cache, Generation.of(model.config, "float32", [[1]], 2, **greedy))
    newest = placed.put((lengths, ends))
    new = newest, loop._parameters, loop._ends
    for lowered in (
        placed.program(Prefilled(4, fresh=True)).lower(placed.weights, cache, (placed.put(hidden), prompt)),
        placed.program(step).lower(placed.weights, cache, new),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.argument_size_in_bytes < 0.6 * whole  # its half, vectors and the cache
        if jax.__version_info__ >= (0, 12):  # XLA for CPUs drops the barriers of older ones before it orders the gathers
            assert memory.temp_size_in_bytes < 1.5 * layer  # the layer and activations


@pytest.mark.exhaustive
def test_the_steps_of_ones_own_loop_take_sharded_weights():
    whole, split = (logits(model) for model in (model_of("grouped", 1, 2), sharded(model_of("grouped", 1, 2))))
    np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-4)


def logits(model: Any) -> np.ndarray:
    """Return the logits of a prefill and of a decode step, side by side."""
    cache = KVCache.make(model.config, 3, 48, dtype="float32", mesh=model.ring.mesh)
    ids = jnp.arange(24).reshape(3, 8) % 31
    first, cache = jax.jit(lambda cache: prefill_prompts(model, ids, cache, jnp.asarray(FIRST), fresh=True))(cache)
    second, cache = jax.jit(lambda cache: decode_step(model, ids[:, :2], cache))(cache)
    return np.concatenate([first[:, None], second], 1)
