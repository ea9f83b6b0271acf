"""The balanced layout of JAX: exact with each feature, refused by name where it does not run, and equal documents alone."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_jax import from_layout, ring_attention, shard_batch, sharded_ring_attention, to_layout

from ..support.balanced import CASES, batch_of_documents, check_documents
from ..support.cases import check
from ..support.selection import first
from .ring import QUICK, SEQ, mesh_of, run_once


@pytest.mark.parametrize("case", first(CASES), ids=str)
def test_each_feature_and_strategy_is_exact(case):
    check(case, run_once(case))


@cache
def program() -> Any:
    """Return a function of whole q, k, v and dout that returns out and the gradients of q, k and v of packed documents."""
    ids, documents, _ = batch_of_documents()
    shard = shard_batch(jnp.asarray(ids), "balanced", 4, documents=jnp.asarray(documents))
    layout, extents, length = shard.layout, shard.extents, shard.length
    assert layout is not None
    call = partial(sharded_ring_attention, mesh=mesh_of(4), layout=layout, length=length, extents=extents)

    @partial(jax.jit, compiler_options=QUICK if jax.default_backend() == "cpu" else None)
    def results(*arrays: jax.Array) -> list[jax.Array]:
        *qkv, dout = (to_layout(x, layout, 4) for x in arrays)
        out, vjp = jax.vjp(call, *qkv)
        return [from_layout(x, layout, 4, length) for x in (out, *vjp(dout))]

    return results


def test_packed_documents_are_each_as_if_alone():
    documents, arrays = batch_of_documents()[1:]
    check_documents(documents, arrays, [np.asarray(x) for x in program()(*arrays)])


def test_a_document_changes_no_bit_of_another():
    documents, arrays = batch_of_documents()[1:]
    changed = documents == 3
    other = [np.where(changed[..., None, None], -3 * x, x) for x in arrays]
    for x, y in zip(*[map(np.asarray, program()(*each)) for each in (arrays, other)], strict=True):
        np.testing.assert_array_equal(x[~changed], y[~changed])
        assert (x[changed] != y[changed]).any()


@pytest.mark.parametrize("rank", range(4))
def test_a_shard_is_the_part_of_all_shards(rank):
    ids, documents, _ = batch_of_documents()
    shard_of = partial(shard_batch, jnp.asarray(ids), "balanced", 4, documents=jnp.asarray(documents), restart_positions=True)
    whole, shard = shard_of(), shard_of(rank)
    assert shard.layout == whole.layout
    for name in ("ids", "labels", "positions", "extents"):
        np.testing.assert_array_equal(np.split(getattr(whole, name), 4, 1)[rank], getattr(shard, name))


OF_TWO = balanced_layout((20, 12), 2)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (OF_TWO, {"backend": "triton"}, "it takes runs of equal length"),
        (OF_TWO, {"backend": "hopper"}, "it takes runs of equal length"),
        (OF_TWO, {"strategy": "direct"}, "its slices are cut from runs of equal length"),
        (OF_TWO, {"length": 31}, "this layout deals 32 tokens to 2 ranks, got 31 tokens and 2 ranks"),
        (balanced_layout((20, 12), 4), {}, "this layout deals 32 tokens to 4 ranks, got 32 tokens and 2 ranks"),
        (balanced_layout((20, 20), 2), {}, "each shard of this balanced layout has 20 tokens, got 16 in q and 16 in k"),
        ("balanced", {}, "a balanced layout follows from documents"),
    ],
)
def test_what_does_not_run_is_refused_by_name(layout: Any, options: dict[str, Any], message: str):
    q = jnp.zeros((1, 32, 4, 8))
    attention = jax.shard_map(partial(ring_attention, layout=layout, **options), mesh=mesh_of(2), in_specs=SEQ, out_specs=SEQ)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(q, q, q)


def test_documents_that_jax_traces_are_refused():
    with pytest.raises(ValueError, match="follows from the values of documents"):
        jax.jit(lambda x: shard_batch(x, "balanced", 2, documents=x)[0])(jnp.zeros((1, 8), jnp.int32))
