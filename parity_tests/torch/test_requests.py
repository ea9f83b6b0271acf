"""Requests of a cache in PyTorch: what a copy of one knows of its tokens, and that a step writes no slot twice."""

from __future__ import annotations

import torch

from ring_attn_torch import CacheSizes, KVCache

from .models import Group

SIZES = CacheSizes(1, 2, 8)


def forked_on_rank(group: Group) -> tuple[list[list[int]], list[list[int]]]:
    """Counts and positions once a copy of a request goes back to its first token."""
    cache = KVCache.make(SIZES, 2, 8, dtype="float32", group=group)
    step = cache.prefill_step(2, "contiguous", [4, 1])
    new = torch.ones(2, 2, 2, 8)
    cache = cache.append(0, new, new, step).advance(step).fork(0, 1).rollback([4, 1])
    return cache.counts.tolist(), cache.positions[:, :4].tolist()


def test_a_copy_of_a_request_knows_which_rank_holds_its_tokens(gloo):
    first, second = gloo(2, forked_on_rank)
    assert first == ([[2, 2], [1, 0]], [[0, 1, -1, -1], [0, -1, -1, -1]])
    assert second == ([[2, 2], [1, 0]], [[2, 3, -1, -1], [-1, -1, -1, -1]])


def test_a_step_writes_no_slot_twice():
    """Of a chunk of more tokens than there are slots the last ones stay."""
    cache = KVCache.make(SIZES, 1, dtype="float32", window=3, room=3)
    step = cache.prefill_step(10, "contiguous")
    assert sorted(step.slots[0].tolist()) == list(range(6))
    assert sorted(step.k_positions[0, :6].tolist()) == list(range(4, 10))
