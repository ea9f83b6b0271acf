"""Whole sequences to shards in JAX: every token of every shard by hand, tracing, meshes, and the loss of uneven shards."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_core import LAYOUTS, full
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_jax import (
    TracedLayout,
    attend_block,
    causal_conv,
    document_extents,
    prefix_extents,
    shard_batch,
    sharded_ring_attention,
    to_layout,
)

from ..support.selection import first
from ..support.shards import DOCUMENTS, EVERYTHING, IDS, KEY_MASK, LENGTH, check_shard, extents, shard
from .models import REPLICATED
from .ring import SEQ, mesh_of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_and_values_may_be_traced(layout):
    @jax.jit
    def program(rank, ids, documents, key_mask):
        options = {"documents": documents, "key_mask": key_mask, "restart_positions": True}
        return shard_batch(ids, layout, 3, rank, **options)._replace(length=None)

    for rank in range(3):
        got = program(rank, IDS, DOCUMENTS, KEY_MASK)._replace(length=LENGTH)
        check_shard(got, shard(IDS, layout, 3, rank, **EVERYTHING), LENGTH)


def test_every_rank_can_cut_its_own_shard_inside_shard_map():
    def own(ids, documents):
        mine = shard_batch(ids, "zigzag", 4, lax.axis_index("seq"), documents=documents)
        return mine._replace(length=None)

    got = jax.jit(jax.shard_map(own, mesh=mesh_of(4), in_specs=REPLICATED, out_specs=SEQ))(IDS, DOCUMENTS)
    expected = shard_batch(jnp.asarray(IDS), "zigzag", 4, documents=jnp.asarray(DOCUMENTS))
    jax.tree.map(np.testing.assert_array_equal, got, expected._replace(length=None))


SPECS = PartitionSpec("data", "seq"), PartitionSpec("data"), PartitionSpec(None, "seq")


@pytest.mark.parametrize("spec", first((each,) for each in SPECS), ids=str)
def test_a_mesh_with_explicit_axes_may_shard_what_is_given(spec):
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    there = lambda x: jax.device_put(x[:2, :20], NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        options = {"documents": there(DOCUMENTS), "key_mask": there(KEY_MASK), "restart_positions": True}
        got = shard_batch(there(IDS), "striped", 2, 1, **options)
        np.testing.assert_array_equal(document_extents(there(DOCUMENTS)), extents(DOCUMENTS[:2, :20]))
    cut = {"documents": DOCUMENTS[:2, :20], "key_mask": KEY_MASK[:2, :20], "restart_positions": True}
    check_shard(got, shard(IDS[:2, :20], "striped", 2, 1, **cut), 20)


def test_a_million_tokens_take_no_more_operations_than_ten():
    def program(ids, cu_seqlens, prefix, rank):
        batch = shard_batch(ids, "zigzag", 8, rank, documents=ids, key_mask=ids > 0, restart_positions=True)
        packed = document_extents(cu_seqlens=cu_seqlens, length=ids.shape[1])
        return batch, packed, prefix_extents(prefix, ids.shape[1])

    def operations(tokens: int) -> int:
        given = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(1, tokens), (9,), (1,), ()])
        return str(jax.make_jaxpr(program)(*given)).count(" = ")

    assert operations(2**20) == operations(16)


def test_cu_seqlens_and_prefix_may_be_traced():
    packed = jax.jit(lambda ends: document_extents(cu_seqlens=ends, length=9))(jnp.array([0, 3, 3, 7]))
    np.testing.assert_array_equal(packed, extents(np.array([[0, 0, 0, 2, 2, 2, 2, -1, -1]])))
    prefix = jax.jit(partial(prefix_extents, length=4))(jnp.array([0, 3]))
    np.testing.assert_array_equal(prefix[..., 1], [[1, 2, 3, 4], [3, 3, 3, 4]])
    with pytest.raises(ValueError, match=r"needs length=\.\.\. for a traced cu_seqlens"):
        jax.jit(lambda ends: document_extents(cu_seqlens=ends))(jnp.array([0, 3]))
    for wrong in (lambda x: document_extents(x[0]), lambda x: document_extents(x / 2), lambda x: prefix_extents(x, 4)):
        with pytest.raises(ValueError, match="must be integers"):
            jax.jit(wrong)(jnp.zeros((2, 4), jnp.int32))


ROWS = np.array([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)


def on_zigzag_shards(q, documents):
    extents = shard_batch(documents, "zigzag", 2, documents=documents).extents
    return sharded_ring_attention(q, q, q, mesh=mesh_of(2), extents=extents)


def in_a_traced_layout(q, documents):
    table = TracedLayout.of(balanced_layout((3, 5), 2))
    extents = to_layout(document_extents(documents), table, 2)
    return sharded_ring_attention(q, q, q, mesh=mesh_of(2), extents=extents, layout=table)


def in_a_block(q, documents):
    return attend_block(q, q, q, extents=document_extents(documents))[0]


@pytest.mark.parametrize("attend", first([on_zigzag_shards, in_a_traced_layout, in_a_block], 2))
@pytest.mark.parametrize(
    "ids", first([[1, 1, 2, 2, 1, 1, 1, 1], [1, 1, -1, -1, 1, 1, 1, 1]]), ids=["an id again", "padding inside"]
)
def test_documents_that_eager_refuses_are_nan_under_jit_in_their_row_alone(ids, attend):
    q, documents = jax.random.normal(jax.random.key(0), (2, 8, 1, 4)), jnp.array([ids, ROWS[1]])
    with pytest.raises(ValueError, match=r"decrease|inside a document"):
        attend(q, documents)

    @jax.jit
    def out_and_dq(q, documents):
        out, pull = jax.vjp(lambda q: attend(q, documents), q)
        return out, *pull(jnp.ones_like(out))

    for found, right in zip(out_and_dq(q, documents), out_and_dq(q, ROWS), strict=True):
        assert jnp.isnan(found[0]).all()
        np.testing.assert_array_equal(found[1], right[1])
        assert not jnp.isnan(right).any()


@pytest.mark.parametrize("ends", [[1, 8], [0, 5, 3], [0, 9]], ids=str)
def test_traced_ends_of_documents_that_eager_refuses_are_impossible_extents(ends):
    extents = jax.jit(lambda ends: document_extents(cu_seqlens=ends, length=8))
    assert (extents(jnp.array(ends)) == jnp.array([-1, 8])).all()


def test_impossible_extents_are_nan_under_jit_at_their_query_alone_and_padding_stays_0():
    q, given = jnp.ones((1, 8, 1, 4)), [[0, 7], [-1, 7], [3, 2], [0, 8], [0, 0], [0, 7], [1, 7], [-1, 9]]
    call = partial(sharded_ring_attention, mesh=mesh_of(2), layout="contiguous", mask=full(), length=7)
    out = jax.jit(lambda q, extents: call(q, q, q, extents=extents))(q, jnp.array([given]))
    np.testing.assert_array_equal(out[0, :, 0, 0], [1, np.nan, np.nan, 1, 0, 1, 1, 0])


def test_integers_that_jax_would_wrap_are_refused():
    with pytest.raises(ValueError, match="ids must fit int32, got 5 to 4294967295"):
        document_extents(np.array([[5, 2**32 - 1]]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="documents must fit int32"):
        shard_batch(jnp.zeros((1, 2), int), "zigzag", 1, documents=jnp.array([[5, 2**32 - 1]], jnp.uint32))


def test_rows_over_another_axis_beside_a_ring_of_one_get_the_gradients_of_one_device():
    x, weight, dout = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 6, 3), (3, 4), (2, 6, 3)]))

    def gradients(mesh, rows):
        spec = PartitionSpec(rows, "seq")
        conv = jax.shard_map(causal_conv, mesh=mesh, in_specs=(spec, REPLICATED), out_specs=spec)
        return jax.jit(jax.grad(lambda x, weight: (conv(x, weight) * dout).sum(), (0, 1)))(x, weight)

    mesh = jax.make_mesh((2, 1), ("data", "seq"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    for found, expected in zip(gradients(mesh, "data"), gradients(mesh_of(1), None), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
