"""Whole sequences to shards and back: each token by hand, gathered ones, and the loss of uneven and of impossible labels."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ring_attn_core import LAYOUTS
from ring_attn_core.plan.balanced import balanced_layout

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
from .framework import library

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


HELD = 13
"""The tokens of a sequence of odd length, in shards with padding."""
ROWS = np.array([12, 3, HELD])
"""A position for each row; the last one is padding, or held by no rank."""
DEALT = balanced_layout((2, 6, 1, 4), 3, seq_local=5)


def gathered(gather: Any, gather_token: Any, x: Any, *, mask: Any, ids: Any, layout: Any, **ring: Any) -> Any:
    """Return wholes, which have x in them, and tokens."""
    xp, ring = library(x), ring | {"layout": layout}
    known, sized = isinstance(layout, str), ring | {"length": HELD}
    whole = gather(x, **sized)
    wholes = gather(x, **(sized if known else ring)), xp.where(gather(mask, **sized), whole, 0), whole + gather(ids, **sized)
    tokens = (gather_token(x, *at, **sized) for at in ([xp.asarray(ROWS)], [], [HELD - 1]))
    return whole, *wholes, *(token[:, None] for token in tokens)


@in_each(
    "ranks,layout",
    jax=first([(3, "traced"), (2, "contiguous"), (3, "balanced"), (1, "zigzag"), (4, "zigzag"), (4, "striped")], 2),
    torch=[(1, "zigzag"), (2, "contiguous"), (4, "zigzag"), (4, "striped"), (3, "balanced")],
)
def test_every_rank_gets_the_whole_and_its_shard_the_sum_of_the_cotangents(framework, ranks, layout):
    """Each rank has cotangents of its own; what padding holds is NaN, and may not matter."""
    rng = np.random.default_rng(ranks)
    x, *dwhole = rng.standard_normal((1 + ranks, 3, HELD, 2, 3)).astype(np.float32)
    dtoken, ids = rng.standard_normal((ranks, 3, 1, 2, 3)).astype(np.float32), (x * 100).astype(np.int32)
    layout = framework.TracedLayout.of(DEALT) if layout == "traced" else DEALT if layout == "balanced" else layout
    there = lambda x, pad: framework.to_layout(framework.array(x), layout, ranks, pad_value=pad)
    call = partial(gathered, framework.gather, framework.gather_token, layout=layout)
    rows = np.stack([x[0, 12], x[1, 3], 0 * x[2, 0]])[:, None]
    truth = x, x, np.where(x > 0, x, 0), x + ids.astype(np.float32), rows, x[:, -1:], x[:, -1:]
    dys = [np.concatenate([0 * each] * ranks, 1) for each in truth]
    dys[0], dys[4] = np.concatenate(dwhole, 1), np.concatenate(dtoken, 1)
    given = {"mask": there(x > 0, False), "ids": there(ids, 0)}
    got, (dx,) = framework.over_ring(ranks, call, [there(x, np.nan)], [], dys, **given)
    for mine, expected in zip(got, truth, strict=True):
        np.testing.assert_array_equal(mine, np.concatenate([expected] * ranks, 1))
    expected = np.sum(dwhole, 0)
    expected[0, 12] += dtoken.sum(0)[0, 0]
    expected[1, 3] += dtoken.sum(0)[1, 0]
    dx = framework.numpy(framework.from_layout(framework.array(dx), layout, ranks, HELD))
    np.testing.assert_allclose(dx, expected, rtol=1e-6, atol=1e-6)
