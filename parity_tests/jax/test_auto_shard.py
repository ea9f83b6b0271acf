"""RingTransformer(auto_shard=True): whole sequences in, whole logits out, with the gradients of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from ring_attn_core import full
from ring_attn_jax import RingTransformer, from_numpy, loss, to_numpy

from ..support.models import LENGTH, TRANSFORMER, Arrays, assert_near, token_ids, transformer_weights
from ..support.selection import first
from .ring import mesh_of

SIZES = TRANSFORMER | {"depth": 1, "mask": full(), "dropout_rate": 0.2}
MASK = np.arange(LENGTH) < np.array([37, 20])[:, None]


def step(mesh: Mesh, auto_shard: bool, **arguments: Any) -> Arrays:
    """Logits, loss and every weight's gradient, of rows with padding."""
    weights = transformer_weights(depth=1)
    model = RingTransformer(**SIZES, mesh=mesh, auto_shard=auto_shard, rngs=nnx.Rngs(0), **arguments)
    graph, state = nnx.split(from_numpy(model, weights), nnx.Param)
    ids, labels = token_ids()

    @jax.jit
    def program(state, ids, mask, labels):
        def objective(state):
            logits = nnx.merge(graph, state)(ids, dropout_seed=3, **{"mask" if auto_shard else "key_mask": mask})
            return loss(logits, labels, axis_name=None), logits

        return jax.value_and_grad(objective, has_aux=True)(state)

    (value, logits), gradients = program(state, jnp.asarray(ids), jnp.asarray(MASK), jnp.asarray(np.where(MASK, labels, -100)))
    nnx.update(model, gradients)
    return {"logits": np.asarray(logits), "loss": np.asarray(value), **to_numpy(model)}


@pytest.fixture(scope="module")
def alone() -> Arrays:
    return step(mesh_of(1), False, layout="contiguous")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", first([AxisType.Auto, AxisType.Explicit]))
def test_whole_sequences_over_a_mesh_are_one_devices(alone, kind):
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(kind, kind), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        got = step(mesh, True, batch_axes="data")
    assert got["logits"].shape == alone["logits"].shape
    assert_near(got, alone, 1e-5)


@pytest.mark.slow
def test_another_layout_is_one_devices(alone):
    assert_near(step(mesh_of(2), True, layout="striped"), alone, 1e-5)


def test_every_device_holds_its_part_of_rows_and_tokens():
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    model = RingTransformer(**SIZES, mesh=mesh, auto_shard=True, batch_axes="data", rngs=nnx.Rngs(0))
    from ring_attn_jax.layers.auto_shard import ShardedRows

    ids = jnp.asarray(token_ids()[0])
    shard = ShardedRows.of(ids, None, model.ring).shard(ids)  # type: ignore[arg-type]
    assert shard.sharding.shard_shape(shard.shape) == (1, 10)


def test_unfitting_ids_and_meshes_are_refused():
    ids = jnp.ones((2, 8), jnp.int32)
    mesh = jax.make_mesh((4, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    whole = RingTransformer(**SIZES, mesh=mesh_of(1), auto_shard=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"ids must be integers \[batch, tokens\], .*, got int32 \[8\]"):
        whole(ids[0])
    with pytest.raises(ValueError, match="ids have 2 rows, which 4 members"):
        RingTransformer(**SIZES, mesh=mesh, batch_axes="data", auto_shard=True, rngs=nnx.Rngs(0))(ids)
    with pytest.raises(ValueError, match="auto_shard=True shards whole arrays over a mesh: pass mesh"):
        RingTransformer(**SIZES, auto_shard=True, rngs=nnx.Rngs(0))
