"""Tests of a rank's peak memory in PyTorch: by every strategy but "gather" it does not grow with the ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn_torch import Gather, ring_attention

from ..support.selection import first
from .memory import peak_bytes

TOKENS, HEADS, DIM = 128, 8, 16
SHARD = 4 * TOKENS * HEADS * DIM
"""Bytes of one array of a rank."""


def held(group: Any, strategy: Any) -> int:
    """Return the most bytes that this rank allocates at a time in a forward and backward, after one call as a warm-up."""
    q, k, v = (torch.randn(1, TOKENS, HEADS, DIM, requires_grad=True) for _ in range(3))

    def call() -> None:
        ring_attention(q, k, v, group=group, strategy=strategy).sum().backward()

    call()
    return peak_bytes(call)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), first([("ring", 4), ("direct", 6), ("two_way", 6), ("ulysses", 4)]))
def test_a_rank_holds_no_more_in_a_larger_ring(gloo, strategy, ranks):
    """``ranks``: the smallest ring in which a rank has as many transfers at a time as in any larger one."""
    small, large = (max(gloo(n, held, strategy)) for n in (ranks, 8))
    assert large < small + SHARD / 2, (small / SHARD, large / SHARD)


def test_a_rank_that_gathers_holds_the_keys_of_all(gloo):
    small, large = (max(gloo(ranks, held, "gather")) for ranks in (4, 8))
    assert large > small + 4 * SHARD, (small / SHARD, large / SHARD)


def test_a_rank_that_gathers_by_groups_of_heads_holds_the_keys_of_two_groups(gloo):
    """Add two ranks, with 4 shards of keys and gradients. A rank holds 2 of 8 groups' keys and 3 groups' gradients, beside what
    the backend holds of one: 3 arrays of a shard in all. Without groups it holds 8 more."""
    small, large = (max(gloo(ranks, held, Gather(groups=8))) for ranks in (2, 4))
    assert large < small + 4 * SHARD, (small / SHARD, large / SHARD)
