"""The balanced layout of JAX as traced arrays: exact, compiled once for all documents, and refused by name elsewhere."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_core import TwoLevel, causal, sliding_window
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_jax import (
    RingTransformer,
    TracedLayout,
    from_layout,
    ring_attention,
    shard_batch,
    sharded_ring_attention,
    to_layout,
)

from ..support.balanced import DOCUMENTS, batch_of_documents
from ..support.cases import Case, computed_bound
from ..support.selection import first
from .ring import QUICK, SEQ, mesh_of

OF_TWO = balanced_layout((20, 12), 2)
UNORDERED = BalancedLayout((((16, 16),), ((8, 8), (0, 8))), 32)


def test_documents_that_jax_traces_are_refused():
    with pytest.raises(ValueError, match="follows from the values of documents"):
        jax.jit(lambda x: shard_batch(x, "balanced", 2, documents=x)[0])(jnp.zeros((1, 8), jnp.int32))


@partial(
    jax.jit,
    static_argnames=("mask", "strategy", "dropout_rate"),
    compiler_options=QUICK if jax.default_backend() == "cpu" else None,
)
def of_traced(arrays: Any, features: dict[str, Any], layout: TracedLayout, dropout_seed: Any, **options: Any) -> Any:
    """Return out, lse and the gradients of q, k and v in a traced layout, and out at padding."""
    put = lambda x: to_layout(x, layout, layout.ranks)
    q, k, v, dout, dlse = map(put, arrays)
    of_heads = "sinks", "alibi_slopes"
    given: Any = {name: x if name in of_heads else put(x) for name, x in features.items()}
    given |= options | {"dropout_seed": dropout_seed}
    call = partial(sharded_ring_attention, mesh=mesh_of(layout.ranks), layout=layout, return_lse=True, **given)
    results, vjp = jax.vjp(call, q, k, v)
    padding = layout.table.reshape(-1) >= layout.length
    whole = [from_layout(x, layout, layout.ranks, layout.length) for x in (*results, *vjp((dout, dlse)))]
    return whole, jnp.where(padding[None, :, None, None], results[0], 0)


TRACED: list[dict[str, Any]] = [
    {"mask": causal(), "key_mask": "random", "alibi": True, "dropout_rate": 0.3},
    {"mask": sliding_window(9), "extents": "documents", "sinks": True, "strategy": TwoLevel(ranks=2)},
    {"mask": sliding_window(7, 3), "key_extents": "tree", "strategy": "two_way"},
    {"mask": causal(), "extents": "documents", "key_extents": "any", "alibi": True, "dropout_rate": 0.3},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", first(TRACED, most=3), ids=str)
def test_a_traced_layout_is_exact_and_other_documents_do_not_compile_anew(options):
    programs, ranks = [], 4 if "strategy" in options else 3
    for documents in (DOCUMENTS, (30, 20, 11), (61,)):
        case = Case(balanced_layout(documents, ranks, seq_local=22), ranks=ranks, length=61, **options)
        assert isinstance(case.layout, BalancedLayout)
        arrays = case.arrays.values()
        static = {"mask": case.mask, "strategy": case.strategy, "dropout_rate": case.dropout_rate or None}
        seed = case.seed if case.dropout_rate else None
        results, of_padding = of_traced([*arrays], case.features, TracedLayout.of(case.layout), seed, **static)
        for name, mine in zip(("out", "lse", "dq", "dk", "dv"), results, strict=True):
            assert relative_error(np.asarray(mine), getattr(case.expected, name)) <= computed_bound(case, name), name
        assert (np.asarray(of_padding) == 0).all()
        programs.append(of_traced._cache_size())  # type: ignore[attr-defined]
    assert programs == programs[:1] * 3


@pytest.mark.exhaustive
def test_fifty_batches_of_other_documents_compile_once():
    rng, sizes = np.random.default_rng(0), []
    for _ in range(50):
        ends = np.sort(rng.choice(np.arange(1, 61), rng.integers(0, 9), replace=False))
        documents = tuple(np.diff(ends, prepend=0, append=61).tolist())
        case = Case(balanced_layout(documents, 3, seq_local=22), ranks=3, length=61, **TRACED[0])
        assert isinstance(case.layout, BalancedLayout)
        traced = TracedLayout.of(case.layout)
        of_traced([*case.arrays.values()], case.features, traced, case.seed, mask=case.mask, strategy="auto", dropout_rate=0.3)
        sizes.append(of_traced._cache_size())  # type: ignore[attr-defined]
    assert sizes == sizes[:1] * 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "gather"}, "strategy='gather' does not run a TracedLayout"),
        ({"strategy": "direct"}, "or the shard.layout that the TracedLayout was made of"),
        ({"length": 31}, "this layout deals 32 tokens to 2 ranks, got 31 tokens"),
        pytest.param(
            *({"alibi_slopes": jnp.ones(4), "backend": "triton"}, "alibi_slopes counts positions along runs"),
            marks=pytest.mark.exhaustive,
        ),
        ({"layout": TracedLayout.of(balanced_layout((40,), 2))}, "a shard of this layout has 20 tokens on each"),
    ],
)
def test_unsupported_calls_with_a_traced_layout_are_refused_by_name(options: dict[str, Any], message: str):
    q = jnp.zeros((1, 32, 4, 8))
    given: Any = {"layout": TracedLayout.of(OF_TWO)} | options
    attention = jax.shard_map(partial(ring_attention, **given), mesh=mesh_of(2), in_specs=SEQ, out_specs=SEQ)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(attention, q, q, q)


def test_a_layout_whose_runs_are_not_in_order_is_not_traced():
    with pytest.raises(ValueError, match="runs are in order of position"):
        TracedLayout.of(UNORDERED)


@pytest.mark.exhaustive
def test_a_model_in_a_traced_layout_computes_what_one_rank_does():
    ids, documents, _ = batch_of_documents()
    documents = np.maximum.accumulate(documents, 1)  # no padding, whose logits are of no use
    sizes: dict[str, Any] = {"vocab": 99, "dim": 16, "depth": 1, "heads": 4, "kv_heads": 2, "layout": "contiguous"}
    model = lambda mesh: RingTransformer(**sizes, mesh=mesh, rngs=nnx.Rngs(0))
    shard_of = partial(shard_batch, jnp.asarray(ids), documents=jnp.asarray(documents))
    whole, shard = shard_of("contiguous", 1), shard_of("balanced", 2)
    assert shard.layout is not None
    alone = nnx.jit(lambda model: model(whole.ids, whole.positions, extents=whole.extents))(model(mesh_of(1)))
    call = lambda model, ids, extents, layout: model(ids, None, layout.length, extents=extents, layout=layout)
    dealt, table = shard.layout, TracedLayout.of(shard.layout)
    static = nnx.jit(lambda model, ids, extents: call(model, ids, extents, dealt))
    for logits in (
        static(model(mesh_of(2)), shard.ids, shard.extents),
        nnx.jit(call)(model(mesh_of(2)), shard.ids, shard.extents, table),
    ):
        np.testing.assert_allclose(from_layout(logits, dealt, 2, shard.length), np.asarray(alone), rtol=2e-4, atol=2e-4)
