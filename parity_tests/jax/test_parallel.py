"""A transformer whose weights, batch and sequence are sharded over a mesh (data, fsdp, seq, tensor) trains as on one device."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ring_attn_jax import RingTransformer, from_numpy, loss, shard_batch, to_numpy

from ..support.models import LENGTH, TRANSFORMER, Arrays, assert_near, token_ids, transformer_weights
from .ring import mesh_of

FEATURES: dict[str, Any] = {"qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "sinks": True}
SIZES: dict[str, Any] = TRANSFORMER | FEATURES | {"alibi": True, "dropout_rate": 0.2, "depth": 1, "vocab": 32}
AXES = "data", "fsdp", "seq", "tensor"
ROWS = 4
SEED = 7

Weights = Any


def weights(tied: bool) -> Arrays:
    """Those of the transformer in float64, with one token more, so that the vocabulary can be sharded too."""
    made = transformer_weights(tied, depth=1, **FEATURES)
    wider = {name: np.concatenate([x, x[:1]]) for name, x in made.items() if name in ("embed.weight", "head.weight")}
    return {name: x.astype(np.float64) for name, x in {**made, **wider}.items()}


def everywhere(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The first dimension over all axes that hold tokens, the last one of a matrix over tensor."""
    return PartitionSpec(("fsdp", "data", "seq"), *("tensor" for _ in shape[1:]))


def as_megatron(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """A matrix the other way round."""
    return PartitionSpec("tensor", ("fsdp", "seq")) if shape[1:] else PartitionSpec("fsdp")


def transformer(mesh: Mesh, tied: bool, spec: Any = None, **where: Any) -> RingTransformer:
    model = RingTransformer(**SIZES | {"tied": tied}, mesh=mesh, **where, rngs=nnx.Rngs(0))
    place = lambda p: jax.device_put(p.astype(jnp.float64), spec and NamedSharding(mesh, spec(p.shape, mesh)))
    nnx.update(model, jax.tree.map(place, nnx.state(model, nnx.Param)))
    return from_numpy(model, weights(tied))


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """ids and labels; the first two rows have half as many labels as the others."""
    ids, labels = token_ids(ROWS)
    labels[:2, : LENGTH * 2 // 3] = -100
    return ids, labels


def sharded_batch(mesh: Mesh, rows: slice = slice(None), **where: Any) -> tuple[jax.Array, jax.Array]:
    """ids and labels in layout order."""
    ids, labels = (x[rows] for x in tokens())
    batch = shard_batch(jnp.asarray(ids), "zigzag", mesh.shape["seq"], labels=jnp.asarray(labels))
    there = NamedSharding(mesh, PartitionSpec(where.get("batch_axes"), "seq"))
    return jax.device_put(batch.ids, there), jax.device_put(batch.labels, there)


@nnx.jit
def value_and_gradients(
    model: RingTransformer, ids: jax.Array, labels: jax.Array, first_row: int = 0
) -> tuple[jax.Array, Weights]:
    dropout = {"dropout_seed": SEED, "dropout_offset": (first_row, 0)}
    objective = lambda model: loss(model(ids, length=LENGTH, **dropout), labels, axis_name=None)
    return nnx.value_and_grad(objective)(model)


@cache
def one_device(tied: bool) -> Arrays:
    with jax.enable_x64(True):
        model = transformer(mesh_of(1), tied)
        value, gradients = value_and_gradients(model, *sharded_batch(mesh_of(1)))
        nnx.update(model, gradients)
        return {"loss": np.asarray(value), **to_numpy(model)}


def mesh_over(kind: AxisType, *sizes: int) -> Mesh:
    return jax.make_mesh(sizes, AXES, axis_types=(kind,) * len(AXES), devices=jax.devices()[: np.prod(sizes)])


@pytest.mark.parametrize(
    ("kind", "sizes", "spec", "tied", "mlp_chunk"),
    [
        (AxisType.Explicit, (1, 2, 2, 1), everywhere, False, 3),
        pytest.param(AxisType.Explicit, (1, 2, 2, 2), as_megatron, True, None, marks=pytest.mark.full),
        pytest.param(AxisType.Explicit, (1, 2, 2, 2), as_megatron, True, 3, marks=pytest.mark.exhaustive),
        pytest.param(AxisType.Explicit, (2, 2, 2, 1), as_megatron, False, None, marks=pytest.mark.exhaustive),
        pytest.param(AxisType.Auto, (1, 2, 2, 2), everywhere, False, None, marks=pytest.mark.full),
        pytest.param(AxisType.Auto, (1, 2, 2, 2), everywhere, False, 3, marks=pytest.mark.full),
    ],
)
def test_loss_and_gradients_of_sharded_weights_are_one_devices(kind, sizes, spec, tied, mlp_chunk):
    mesh = mesh_over(kind, *sizes)
    where = {"batch_axes": ("data", "fsdp"), "head_axis": "tensor"}
    with jax.enable_x64(True), jax.set_mesh(mesh):
        model = transformer(mesh, tied, spec, **where, mlp_chunk=mlp_chunk)
        shardings = jax.tree.map(lambda p: p.sharding, nnx.state(model, nnx.Param))
        value, gradients = value_and_gradients(model, *sharded_batch(mesh, **where))
        if kind == AxisType.Explicit:
            assert jax.tree.map(lambda g: g.sharding, gradients) == shardings
        nnx.update(model, gradients)
        got = {"loss": np.asarray(value), **to_numpy(model)}
    assert_near(got, one_device(tied), 1e-12)


class Rematerialised(nnx.Module):
    """A block of which only the inputs are kept, and what the ring gave, so that it runs once."""

    def __init__(self, block: nnx.Module) -> None:
        self.block = block

    def __call__(self, x: jax.Array, positions: jax.Array, length: int, **arguments: Any) -> jax.Array:
        policy = jax.checkpoint_policies.save_only_these_names("ring_attn_out", "ring_attn_lse")
        call = lambda block, x, positions, arguments: block(x, positions, length, **arguments)
        return nnx.remat(call, policy=policy)(self.block, x, positions, arguments)


@pytest.mark.exhaustive
def test_two_rematerialised_microbatches_of_uneven_labels_are_a_step_of_one_device():
    mesh = mesh_over(AxisType.Explicit, 1, 2, 2, 1)
    where = {"batch_axes": ("data", "fsdp")}
    labels = (tokens()[1] != -100).sum()
    with jax.enable_x64(True), jax.set_mesh(mesh):
        model = transformer(mesh, True, everywhere, **where)
        model.blocks[0] = Rematerialised(model.blocks[0])  # type: ignore[assignment]
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        gradients = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        for row in (0, 2):
            ids, targets = sharded_batch(mesh, slice(row, row + 2), **where)
            _, new = value_and_gradients(model, ids, targets, row)
            share = (targets != -100).sum() / labels
            gradients = jax.tree.map(lambda total, g, share=share: total + share * g, gradients, new)
        optimizer.update(model, gradients)
        model.blocks[0] = model.blocks[0].block
        moved = to_numpy(model)
    before = weights(True)
    gradients = {name: (before[name] - x) / 0.1 for name, x in moved.items()}
    assert_near({"loss": one_device(True)["loss"], **gradients}, one_device(True), 1e-12)


@pytest.mark.exhaustive
def test_weights_from_numpy_stay_sharded():
    mesh = mesh_over(AxisType.Explicit, 1, 2, 2, 2)
    with jax.set_mesh(mesh):
        model = RingTransformer(**SIZES, mesh=mesh, head_axis="tensor", rngs=nnx.Rngs(0))
        place = lambda p: jax.device_put(p, NamedSharding(mesh, everywhere(p.shape, mesh)))
        nnx.update(model, jax.tree.map(place, nnx.state(model, nnx.Param)))
        shardings = jax.tree.map(lambda p: p.sharding, nnx.state(model, nnx.Param))
        from_numpy(model, {name: -x for name, x in to_numpy(model).items()})
        assert jax.tree.map(lambda p: p.sharding, nnx.state(model, nnx.Param)) == shardings
