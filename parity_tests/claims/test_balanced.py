"""The balanced layout: exact with each feature, refused by name where it does not run, and equal documents alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.plan.balanced_layout import BalancedLayout

from ..support.balanced import CASES, JOINED_CASES, TREE_CASES, batch_of_documents, check_documents
from ..support.cases import check
from ..support.selection import first, in_each

IN_JAX = [CASES[i] for i in (0, 1, 2, 3, 7, 4, 5, 6)]
TREES_IN_JAX = [TREE_CASES[i] for i in (2, 4, 0, 3, 1, 5, 6, *range(7, len(TREE_CASES)))]


@in_each("case", jax=first(IN_JAX, 0, 5), torch=first(CASES, 4), slow="jax")
def test_each_feature_and_strategy_is_exact(framework, case):
    check(case, framework.attention(case, once=True))


@in_each("case", jax=first([JOINED_CASES[i] for i in (0, 3, 1, 2)], 0, 2), torch=first(JOINED_CASES, 4))
def test_joined_shards_are_exact(framework, case):
    check(case, framework.attention(case, once=True))


@in_each("case", jax=first(TREES_IN_JAX, 1, 4), torch=first(TREE_CASES, 2), slow="jax")
def test_attention_over_trees_is_exact(framework, case):
    check(case, framework.attention(case, once=True))


def over_documents(framework: Any, ranks: int, arrays: list[np.ndarray], strategy: str = "auto") -> list[np.ndarray]:
    """Return whole out and the gradients of q, k and v of packed documents."""
    ids, documents, _ = batch_of_documents()
    shard = framework.shard_batch(framework.array(ids), "balanced", ranks, documents=framework.array(documents))
    q, k, v, dout = (framework.to_layout(framework.array(x), shard.layout, ranks) for x in arrays)
    call = partial(framework.ring_attention, layout=shard.layout, length=shard.length, strategy=strategy)
    (out,), gradients = framework.over_ring(ranks, call, [q, k, v], cotangents=[dout], extents=shard.extents)
    natural = lambda x: framework.from_layout(framework.array(x), shard.layout, ranks, shard.length)
    return [np.asarray(natural(x)) for x in (out, *gradients)]


@in_each("ranks", jax=first([3], 0), torch=[1, 4])
def test_packed_documents_are_each_as_if_alone(framework, ranks):
    _, documents, arrays = batch_of_documents()
    check_documents(documents, arrays, over_documents(framework, ranks, arrays))


@in_each("ranks,strategy", jax=first([(3, x) for x in ("direct", "ring", "gather")], 0, 1), torch=[(4, "direct"), (4, "ring")])
def test_a_document_changes_no_bit_of_another(framework, ranks, strategy):
    _, documents, arrays = batch_of_documents()
    changed = documents == 3
    other = [np.where(changed[..., None, None], -3 * x, x) for x in arrays]
    for x, y in zip(*(over_documents(framework, ranks, each, strategy) for each in (arrays, other)), strict=True):
        np.testing.assert_array_equal(x[~changed], y[~changed])
        assert (x[changed] != y[changed]).any()


@pytest.mark.parametrize("rank", range(4))
def test_a_shard_is_the_part_of_all_shards(framework, rank):
    ids, documents = map(framework.array, batch_of_documents()[:2])
    shard_of = partial(framework.shard_batch, ids, "balanced", 4, documents=documents, restart_positions=True)
    whole, shard = shard_of(), shard_of(rank)
    assert shard.layout == whole.layout
    for name in ("ids", "labels", "positions", "extents"):
        np.testing.assert_array_equal(np.split(np.asarray(getattr(whole, name)), 4, 1)[rank], np.asarray(getattr(shard, name)))


OF_TWO = balanced_layout((20, 12), 2)
UNORDERED = BalancedLayout((((16, 16),), ((8, 8), (0, 8))), 32)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (OF_TWO, {"backend": "hopper", "dropout_rate": 0.1, "dropout_seed": 3}, "dropout_seed counts positions along runs"),
        (UNORDERED, {"backend": "triton"}, "the runs of a rank are not in order of position"),
        (OF_TWO, {"length": 31}, "this layout deals 32 tokens to 2 ranks, got 31 tokens and 2 ranks"),
        (balanced_layout((20, 12), 4), {}, "this layout deals 32 tokens to 4 ranks, got 32 tokens and 2 ranks"),
        (balanced_layout((20, 20), 2), {}, "each shard of this balanced layout has 20 tokens, got 16 in q and 16 in k"),
        ("balanced", {}, "a balanced layout follows from documents"),
    ],
)
def test_unsupported_calls_with_a_balanced_layout_are_refused_by_name(framework, layout, options, message):
    q = np.zeros((1, 32, 4, 8), np.float32)
    framework.refuses(message, 2, partial(framework.ring_attention, layout=layout, **options), q, q, q)
