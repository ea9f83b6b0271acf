"""Requests of a cache in PyTorch: what a copy of one knows of its tokens, and the slots that a step writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn_core.cache.spec import CacheSpec
from ring_attn_torch import CacheSizes, KVCache
from ring_attn_torch.inference.step import CachedRequests, append_chunk, append_tokens

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


def test_the_last_tokens_of_a_chunk_longer_than_the_slots_stay_one_in_each_slot():
    cache = KVCache.make(SIZES, 1, dtype="float32", window=3, room=3)
    step = cache.prefill_step(10, "contiguous")
    assert sorted(step.slots[0].tolist()) == list(range(6))
    assert sorted(step.k_positions[0, :6].tolist()) == list(range(4, 10))


def test_a_token_beyond_the_capacity_is_lost_and_overwrites_none():
    """A replay of a CUDA graph checks no room; here the step runs without its check."""
    cache = KVCache.make(SIZES, 2, 8, dtype="float32")
    for tokens in (6, 4):
        cache.check_rows_room = lambda *_: None  # type: ignore[method-assign]
        step = cache.step(tokens)
        new = step.positions[..., None, None].float().expand(2, tokens, 2, 8)
        cache = cache.append(0, new, new, step).advance(step)
    assert cache.positions[:, :-1].tolist() == cache.k[0, :, :-1, 0, 0].tolist() == [list(range(8))] * 2
    assert (cache.counts.tolist(), cache.lengths.tolist()) == ([[8]] * 2, [8, 8])
    del cache.check_rows_room
    with pytest.raises(ValueError, match="the cache is full: request 0 has 8 tokens, and 1 more exceed the capacity of 8"):
        cache.step()
    cache.rollback([1, 7])
    step = cache.step()
    assert step.k_positions[:, :-1].tolist() == [[0, 1, *[-1] * 6], list(range(8))]


def held(rank: int, counts: list[int], positions: list[int]) -> CachedRequests:
    """A request on two ranks of 4 slots each; the last of ``positions`` is the extra slot's."""
    spec = CacheSpec.of(SIZES, 1, 8, 2, dtype="float32")
    where, of_ranks, length = (torch.tensor([x], dtype=torch.int32) for x in (positions, counts, sum(counts)))
    return CachedRequests(where, of_ranks, length, spec, rank)


@pytest.mark.parametrize(("rank", "slots"), [(0, [0, 2, 4, 6]), (1, [1, 3, 5, 7])])
def test_each_rank_loses_the_tokens_beyond_its_slots(rank, slots):
    step: Any = append_tokens(held(rank, [3, 3], [*slots[:3], -1, -1]), 4, None)
    assert step["k_positions"][0, :-1].tolist() == slots
    assert (step["counts"].tolist(), step["lengths"].tolist()) == ([[4, 4]], [8])


def test_a_chunk_on_a_full_rank_is_lost_there_and_overwrites_none():
    step: Any = append_chunk(held(0, [3, 1], [0, 1, 2, -1, -1]), torch.tensor([3], dtype=torch.int32), "contiguous", 2)
    assert step["k_positions"][0, :-1].tolist() == [0, 1, 2, 4]
    assert (step["counts"].tolist(), step["lengths"].tolist()) == ([[5, 2]], [7])
