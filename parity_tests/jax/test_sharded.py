"""Every feature in the hands of sharded_ring_attention: batch, tokens and heads sharded at once, arrays and seeds that change."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_core.reference.oracle import Attention
from ring_attn_jax import (
    from_layout,
    loss,
    sharded_dilated_attention,
    sharded_ring_attention,
    sharded_summary_attention,
    to_layout,
)

from ..support.cases import Case, check
from ..support.selection import first
from .ring import mesh_of

KINDS = {"auto": (AxisType.Auto,) * 3, "explicit": (AxisType.Explicit,) * 3, "mixed": (AxisType.Explicit, *(AxisType.Auto,) * 2)}
EVERYTHING = Case(extents="documents", key_mask="random", softcap=2.0, sinks=True, alibi=True, dropout_rate=0.3, length=23)
SEQUENCES = "q", "k", "v", "extents", "key_mask"


def inputs(case: Case) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x) for name, x in {**case.arrays, **case.features}.items() if name not in ("dout", "dlse")}


def results(case: Case, ranks: int, **options) -> Attention:
    """out, lse and the gradients of q, k, v and sinks, in natural order."""
    of = lambda x: to_layout(jnp.asarray(x), "zigzag", ranks)
    dout, dlse = of(case.arrays["dout"]), of(case.arrays["dlse"])

    def attention(learned, others):
        call = {"mask": case.mask, "length": case.length, "return_lse": True} | case.scalars | options
        out, lse = sharded_ring_attention(**learned, **others, **call)
        return jnp.sum(out * dout) + jnp.sum(lse * dlse), (out, lse)

    placed = {name: of(x) if name in SEQUENCES else x for name, x in inputs(case).items()}
    learned = {name: placed.pop(name) for name in ("q", "k", "v", "sinks")}
    (_, pair), gradients = jax.jit(jax.value_and_grad(attention, has_aux=True))(learned, placed)
    natural = lambda x: from_layout(np.asarray(x), "zigzag", ranks, case.length)
    return Attention(*map(natural, (*pair, *(gradients[name] for name in "qkv"))), dsinks=np.asarray(gradients["sinks"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", first((kind,) for kind in KINDS.values()), ids=KINDS)
def test_every_feature_on_a_data_seq_tensor_mesh_is_exact(kind):
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=kind)
    check(EVERYTHING, results(EVERYTHING, 2, mesh=mesh, batch_axes="data", head_axis="tensor"))


def test_an_offset_is_added_to_those_of_the_shards():
    case = Case(dropout_rate=0.5, length=16, batch=2)
    ring = partial(sharded_ring_attention, mask=case.mask, dropout_rate=0.5, dropout_seed=3)
    arrays = inputs(case)
    whole = ring(**arrays, mesh=mesh_of(1))
    second_row = {name: x[1:] for name, x in arrays.items()}
    np.testing.assert_array_equal(ring(**second_row, mesh=mesh_of(1), dropout_offset=(1, 0))[0] == 0, whole[1] == 0)
    last_group = {name: x[:, :, x.shape[2] // 2 :] for name, x in arrays.items()}
    last = ring(**last_group, mesh=mesh_of(1), dropout_offset=(jnp.int32(0), jnp.int32(2)))
    np.testing.assert_allclose(last, whole[:, :, 2:], atol=1e-6)


SEEDS = (1, 2), (jnp.uint32(1), jnp.uint32(2)), (jnp.int32(1), jnp.int32(2))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("seeds", first(((pair,) for pair in SEEDS), 2), ids=repr)
def test_outside_jit_a_new_seed_compiles_nothing(seeds):
    arrays = inputs(Case(length=16))
    ring = partial(sharded_ring_attention, **arrays, mesh=mesh_of(2), dropout_rate=0.5)
    first = ring(dropout_seed=seeds[0])
    with jax.no_tracing():
        second = ring(dropout_seed=seeds[1])
    assert (first != second).any()
    np.testing.assert_array_equal(second, ring(dropout_seed=2))


def test_without_dropout_a_new_seed_compiles_nothing_either():
    arrays = inputs(Case(length=16))
    ring = partial(sharded_ring_attention, **arrays, mesh=mesh_of(2), dropout_rate=0.0)
    ring(dropout_seed=1)
    with jax.no_tracing():
        ring(dropout_seed=2, dropout_offset=[0, 3])


def test_an_argument_of_another_type_is_not_taken_for_an_equal_one():
    ring = partial(sharded_ring_attention, **inputs(Case(length=16)), mesh=mesh_of(2))
    ring(softcap=1)
    with pytest.raises(ValueError, match="softcap must be"):
        ring(softcap=True)


@pytest.mark.parametrize("dtype", first(["uint32", "int32", "uint8"]))
def test_extents_that_are_traced_and_reach_beyond_the_keys_are_cut(dtype):
    arrays = inputs(Case(length=16))
    ring = partial(sharded_ring_attention, **arrays, mesh=mesh_of(2))
    beyond = np.broadcast_to(np.array([0, np.iinfo(dtype).max], dtype), (2, 16, 2))
    np.testing.assert_allclose(jax.jit(lambda extents: ring(extents=extents))(beyond), ring(), atol=1e-6)


@pytest.mark.exhaustive
def test_other_arrays_compile_nothing_either():
    arrays = inputs(Case(length=16, extents="any", key_mask="random", sinks=True, alibi=True))
    ring = partial(sharded_ring_attention, mesh=mesh_of(2))
    ring(**arrays)
    other = {name: jnp.flip(x, 0) for name, x in arrays.items()}
    with jax.no_tracing():
        ring(**other)


@pytest.mark.parametrize("seed", [-3, 2**31 + 5, 2**40 + 7])
def test_seeds_of_any_size_are_taken(seed):
    arrays = inputs(Case(length=16))
    ring = partial(sharded_ring_attention, **arrays, mesh=mesh_of(2), dropout_rate=0.5)
    assert (ring(dropout_seed=seed) != ring(dropout_seed=seed % 2**31)).any()


def test_slopes_are_constants():
    arrays = inputs(Case(length=16, alibi=True))
    slopes = arrays.pop("alibi_slopes")
    ring = lambda slopes: sharded_ring_attention(**arrays, alibi_slopes=slopes, mesh=mesh_of(2)).sum()
    assert (jax.grad(ring)(slopes) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", first([jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto]))
def test_without_a_mesh_it_takes_that_of_set_mesh(kind):
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(kind,))
    call = lambda q, **given: (sharded_ring_attention(q, q, q, **given) ** 2).sum()
    q = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    with jax.set_mesh(mesh):
        want = np.asarray(jax.grad(lambda q: call(q, mesh=mesh))(q))
        for gradient in (jax.grad(call), jax.jit(jax.grad(call))):
            np.testing.assert_array_equal(np.asarray(gradient(jnp.asarray(q))), want)
    with pytest.raises(ValueError, match=r"there is no mesh: pass mesh=, or call under jax.set_mesh\(mesh\)"):
        call(q)


CALLS = {
    "ring": sharded_ring_attention,
    "dilated": partial(sharded_dilated_attention, segments=(4, 8), dilations=(1, 2)),
    "summary": partial(sharded_summary_attention, block=2, window=1, pooling="mean"),
    "loss": lambda q, k, v, **axes: loss(q[..., 0], jnp.zeros_like(k[..., 0, 0], int), axis_name="seq", **axes),
}


@pytest.mark.parametrize("call", first(CALLS.values(), 2), ids=CALLS)
def test_rows_keep_their_explicit_axes_if_batch_axes_is_forgotten(call):
    """The program of the gradient is the one with ``batch_axes``, to the letter."""
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        q = jax.device_put(jnp.ones((4, 8, 2, 4)), NamedSharding(mesh, PartitionSpec("data", "seq")))
        text = lambda **axes: str(jax.make_jaxpr(jax.grad(lambda q: (call(q, q, q, mesh=mesh, **axes) ** 2).sum()))(q))
        named, forgotten = (re.sub("0x[0-9a-f]+", "", text(**axes)) for axes in ({"batch_axes": "data"}, {}))
    assert forgotten == named


@pytest.mark.exhaustive
def test_rows_keep_their_auto_axes_outside_jit_if_batch_axes_is_forgotten():
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    q = jax.device_put(jax.random.normal(jax.random.key(0), (4, 8, 2, 4)), NamedSharding(mesh, PartitionSpec("data", "seq")))
    out = sharded_ring_attention(q, q, q, mesh=mesh)
    assert out.sharding.spec == PartitionSpec("data", "seq")
    np.testing.assert_array_equal(out, sharded_ring_attention(q, q, q, mesh=mesh, batch_axes="data"))
