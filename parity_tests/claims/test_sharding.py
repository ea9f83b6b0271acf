"""Whole sequences to shards: every token of every shard by hand, and the loss of uneven and of impossible labels."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ring_attn_core import LAYOUTS

from ..support.models import assert_near
from ..support.selection import first, in_each, one_in, one_of_each
from ..support.shards import (
    IDS,
    IMPOSSIBLE,
    IMPOSSIBLE_GRADIENT,
    LENGTH,
    OPTIONS,
    RANKS,
    UNEVEN,
    UNEVEN_LABELS,
    check_shard,
    shard,
    uneven,
    uneven_loss,
)

ONE = [np.ones((), np.float32)]


@in_each("ranks,layout", jax=one_in(4, product(RANKS, LAYOUTS)), torch=one_of_each(len(LAYOUTS), product(RANKS, LAYOUTS)))
def test_every_token_of_every_shard_is_right(framework, ranks, layout):
    for options in OPTIONS:
        expected = [shard(IDS, layout, ranks, rank, **options) for rank in range(ranks)]
        shard_of = partial(framework.shard_batch, framework.array(IDS), layout, ranks, **framework.arrays(options))
        for rank in range(ranks):
            check_shard(shard_of(rank), expected[rank], LENGTH)
        whole = {name: np.concatenate([e[name] for e in expected], 1) for name in expected[0]}
        check_shard(shard_of(), whole, LENGTH)


def embedded_loss(loss: Any, embedding: Any, head: Any, *, ids: Any, labels: Any, **ring: Any) -> Any:
    return loss(embedding[ids] @ head, labels, **ring)


@in_each("ranks", jax=first([4], 0), torch=[4])
def test_loss_of_uneven_shards_is_one_devices(framework, ranks):
    ids, *weights = uneven()
    batch = framework.shard_batch(framework.array(ids), "contiguous", ranks, documents=framework.array(UNEVEN))
    assert [int((x != -100).sum()) for x in np.split(np.asarray(batch.labels), ranks, 1)] == UNEVEN_LABELS
    call, given = partial(embedded_loss, framework.loss), {"ids": batch.ids, "labels": batch.labels}
    ring = framework.over_ring(ranks, call, [], weights, ONE, **given)
    for (value,), gradients in (ring, framework.pull(partial(call, **given, **framework.no_ring), weights)):
        assert_near({"loss": value} | dict(zip(("embedding", "head"), gradients, strict=True)), uneven_loss(), 1e-6)


def test_loss_is_inf_with_finite_gradients_where_a_label_is_impossible(framework):
    labels = np.ones(IMPOSSIBLE.shape[:2], np.int32)
    ring = framework.over_ring(4, partial(framework.loss), [IMPOSSIBLE], cotangents=ONE, labels=labels)
    alone = framework.pull(lambda x: framework.loss(x, framework.array(labels), **framework.no_ring), [IMPOSSIBLE])
    for (value,), (gradient,) in (ring, alone):
        assert value == np.inf
        np.testing.assert_allclose(gradient, IMPOSSIBLE_GRADIENT, rtol=1e-6)
