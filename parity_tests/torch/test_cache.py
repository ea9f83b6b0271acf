"""KVCache and prefill in PyTorch: stories of requests against a model, one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_torch import KVCache, prefill

from ..support.spawn import PerRank
from .caches import small, snapshot
from .models import Group


def filled(cache: KVCache, tokens: int) -> KVCache:
    """With ``tokens`` tokens of each request."""
    step = cache.prefill_step(tokens, "contiguous")
    for layer in range(2):
        cache.append(layer, torch.ones(2, tokens, 2, 8), torch.ones(2, tokens, 2, 8), step)
    return cache.advance(step)


def appended(cache: KVCache, layer: Any = 0, dtype: torch.dtype = torch.float32, heads: int = 2) -> None:
    cache.append(layer, torch.ones(2, 1, heads, 8, dtype=dtype), torch.ones(2, 1, heads, 8, dtype=dtype), cache.step())


def out_of_date(cache: KVCache) -> None:
    step = cache.step()
    filled(cache, 1).append(0, torch.ones(2, 1, 2, 8), torch.ones(2, 1, 2, 8), step)


def of_another(cache: KVCache) -> None:
    cache.append(0, torch.ones(2, 1, 2, 8), torch.ones(2, 1, 2, 8), small().step())


def prefilled(cache: KVCache, layout: str | None = "zigzag", heads: int = 4, **arguments: Any) -> None:
    step = cache.step(2) if layout is None else cache.prefill_step(2, layout)
    q, k = torch.ones(2, 2, heads, 8), torch.ones(2, 2, 2, 8)
    prefill(q, k, k, cache, 0, step, **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.step(3), "the cache is full: request 0 has 6 tokens, and 3 more exceed the capacity of 8"),
        (lambda cache: cache.check_room([1, 3]), "request 1 has 6 tokens, and 3 more"),
        (lambda cache: cache.check_room(4, "striped"), "rank 0 has 6 of its 8 slots of request 0 in use, and holds 4"),
        (lambda cache: cache.prefill_step(4), "rank 0 has 6 of its 8 slots"),
        (lambda cache: cache.prefill_step(3), "zigzag over 1 ranks needs an even number"),
        (lambda cache: cache.prefill_step(2, "spiral"), "unknown layout 'spiral'"),
        (lambda cache: cache.prefill_step(2, lengths=[1, 3]), r"lengths\[1\]=3: it must be 0 to 2, what the shards hold"),
        (lambda cache: cache.prefill_step(2, lengths=[1]), "lengths must be 2 ints, one for every request"),
        (lambda cache: cache.prefill_step(2, fresh=True), "fresh=True, and some request of the step has tokens"),
        (lambda cache: cache.step(0), "tokens must be an int of at least 1"),
        (lambda cache: cache.step(2, valid=torch.ones(2, 2)), r"valid must be bool \[requests, tokens\] = \[2, 2\]"),
        (lambda cache: cache.step(valid=[[True], [True]]), r"valid must be bool \[requests, tokens\] = \[2, 1\], .* got list"),
        (lambda cache: cache.step(rows=[]), "rows names no request"),
        (lambda cache: cache.prefill_step(2, lengths=1.5), "lengths must be 2 ints"),
        (lambda cache: cache.append(0, None, None, cache.step()), r"k must be \[requests, tokens, kv_heads, dim\]"),
        (lambda cache: appended(cache, layer=np.int64(-1)), "layer=-1 is not one of the cache's 2 layers"),
        (of_another, "or of another cache"),
        (lambda cache: prefilled(cache, sinks=torch.zeros(1)), r"sinks must be \[heads\] = \[4\]"),
        (lambda cache: cache.step(rows=2), "rows must be an int or ints from 0 to 1"),
        (lambda cache: cache.reset([0, 0]), "rows names a request twice"),
        (lambda cache: cache.evict(-1), "rows must be an int or ints from 0 to 1"),
        (lambda cache: cache.fork(0, 5), "target must be an int or ints from 0 to 1"),
        (lambda cache: cache.fork([0, 1], [1]), "fork copies one request to some"),
        (lambda cache: cache.fork([[0]], [1]), "source must be an int or ints from 0 to 1"),
        (lambda cache: cache.rollback([1, -1]), r"lengths\[1\]=-1: it must be 0 to"),
        (lambda cache: cache.reserve(9), "fixed capacity"),
        (lambda cache: appended(cache, dtype=torch.bfloat16), "k and v are bfloat16, and a cache of float32 takes float32"),
        (lambda cache: appended(cache, heads=1), r"k must be \[requests, tokens, kv_heads, dim\] = \[2, 1, 2, 8\]"),
        (lambda cache: appended(cache, layer=2), "layer=2 is not one of the cache's 2 layers"),
        (lambda cache: cache.advance(cache.step()), r"layers \[0, 1\] have not been written in this step"),
        (out_of_date, "this step was made before the cache has changed"),
        (lambda cache: prefilled(cache, None), "expected a step from cache.prefill_step, got one from cache.step"),
        (lambda cache: prefilled(cache, heads=3), "kv heads must divide query heads"),
        (lambda cache: prefilled(cache, window=-1), "window must be an int of at least 0"),
        (lambda cache: prefilled(cache, order="global", length=7), r'order="global" needs length, .* of at least 8, .* got 7'),
        (lambda cache: prefilled(cache, alibi_slopes=torch.ones(4)), "alibi_slopes and a request that has tokens already"),
        (lambda cache: prefilled(cache, backend="spiral"), "spiral"),
    ],
)
def test_invalid_calls_are_refused_and_change_nothing(call, message):
    cache = filled(small(), 6)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        call(cache)
    if call is not out_of_date:
        after = snapshot(cache)
        assert all((before[name] == after[name]).all() for name in ("positions", "counts", "lengths"))
    assert filled(cache.reset(), 6).lengths.tolist() == [6, 6]


def test_a_window_refuses_what_it_cannot_go_back_to_and_what_it_does_not_see():
    cache = filled(small(capacity=None, window=4, room=3), 12)
    assert filled(cache, 3).rollback([12, 15]).lengths.tolist() == [12, 15]
    with pytest.raises(ValueError, match="request 0 was 15 tokens long and shall go back to 11: this cache has room for 3"):
        cache.rollback([11, 15])
    with pytest.raises(ValueError, match="a step of 4 tokens, and this cache has room for 3 beyond its window of 4"):
        cache.step(4)
    with pytest.raises(ValueError, match="window=5 sees further back than the 4 that this cache keeps"):
        prefilled(cache, window=5)
    cache.append(0, torch.ones(2, 3, 2, 8), torch.ones(2, 3, 2, 8), cache.step(3))  # a step that ends here
    with pytest.raises(ValueError, match="request 1 was 18 tokens long and shall go back to 14"):
        cache.rollback([12, 14])


def test_a_full_request_stops_no_step_that_leaves_it_out():
    cache = small()
    room = cache.spec.capacity
    assert room is not None
    for tokens, of_first in ((room - 2, room - 2), (2, 2), (2, 0)):
        valid = torch.tensor([[i < of_first for i in range(tokens)], [i < 1 for i in range(tokens)]])
        step = cache.step(tokens, valid=valid)
        for layer in (0, 1):
            cache.append(layer, torch.ones(2, tokens, 2, 8), torch.ones(2, tokens, 2, 8), step)
        cache.advance(step)
    assert cache.lengths.tolist() == [room, 3]
    with pytest.raises(ValueError, match=f"request 0 has {room} tokens, and 1 more"):
        cache.step(1, valid=torch.tensor([[True], [False]]))


def test_a_step_from_before_a_replay_is_refused():
    cache = small()
    step = cache.step(1)
    cache.replayed(1)
    with pytest.raises(ValueError, match="this step was made before the cache has changed"):
        cache.append(0, torch.ones(2, 1, 2, 8), torch.ones(2, 1, 2, 8), step)


def test_no_gradient_is_promised():
    q = torch.ones(2, 2, 2, 8, requires_grad=True)
    cache = small()
    with pytest.raises(ValueError, match=r"prefill has no gradient, .* call it under torch.no_grad"):
        prefill(q, q, q, cache, 0, cache.prefill_step(2))
    with pytest.raises(ValueError, match=r"KVCache.append is for inference and has no gradient"):
        cache.append(0, q, q.detach(), cache.step(2))
    assert not cache.k.requires_grad


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({"capacity": (8, 16)}, "disagree on slots: 4 on rank 0, 8 on rank 1"),
        ({"window": (None, 2)}, "disagree on slots|disagree on window"),
        ({"dtype": ("float32", "int8")}, "rank 1: dtype must be one of"),
        ({"lengths": ([3, 4], [4, 3])}, r"disagree on lengths: \[3, 4\] on rank 0, \[4, 3\] on rank 1"),
        ({"lengths": (1.5, [4, 3])}, "rank 0: lengths must be 2 ints"),
        ({"lengths": ([np.int64(3), 4], [4, 3])}, r"disagree on lengths: \[3, 4\] on rank 0, \[4, 3\] on rank 1"),
        ({"k_scale": (1, 2)}, r"disagree on k_scale: \[\[1.0, 1.0\], \[1.0, 1.0\]\] on rank 0"),
        ({"cached": (2, 1)}, r"disagree on cached lengths: \[2, 2\] on rank 0, \[1, 1\] on rank 1"),
        ({"tokens": (2, 4)}, "disagree on tokens: 2 on rank 0, 4 on rank 1"),
        ({"new": ("float32", "bfloat16")}, "rank 1: k and v are bfloat16, and a cache of float32 takes float32"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same(gloo, mine, message):
    of_ranks = [{name: values[rank] for name, values in mine.items()} for rank in range(2)]
    gloo.refuse(message, 2, disagreeing_on_rank, PerRank(*of_ranks))


def disagreeing_on_rank(group: Group, mine: dict[str, Any]) -> None:
    options = {name: mine.pop(name) for name in ("capacity", "window", "dtype") if name in mine}
    if "k_scale" in mine:
        options |= {"dtype": "float8_e4m3fn", "k_scale": torch.full((2, 2), mine["k_scale"]), "v_scale": torch.ones(2, 2)}
    cache = small(group=group, **{"capacity": 16} | options)
    if "cached" in mine:
        cache.host_state.know([[mine["cached"], 0]] * 2, [2, 2])  # as if the ranks had made other steps
    cache.prefill_step(mine.get("tokens", 4), "contiguous", mine.get("lengths", [1, 1]))
    appended(cache, dtype=getattr(torch, mine["new"]))


def test_a_step_does_not_wait_for_the_device_and_the_host_asks_only_where_bounds_are_not_enough():
    """Run on a meta device, whose tensors have no values: reading one is an error."""
    with torch.device("meta"):
        cache = small(capacity=12)
        valid = torch.ones(2, 2, dtype=torch.bool)
    for tokens in (2, 2, 2, 2):
        step = cache.step(tokens, valid=valid)
        for layer in range(2):
            cache.append(layer, *(torch.ones(2, tokens, 2, 8, device="meta") for _ in "kv"), step=step)
        cache.advance(step)
        cache.rollback(torch.ones(2, dtype=torch.int32, device="meta"))
    cache.replayed(4)
    with pytest.raises((NotImplementedError, RuntimeError)):
        cache.step()


def test_a_full_cache_takes_a_captured_step_of_no_token_and_counts_of_each_request_are_noted(monkeypatch):
    cache = small(capacity=6)
    cache.replayed([6, 2])
    assert cache.host_state.lengths == [6, 2]
    valid = torch.tensor([[False], [True]])
    monkeypatch.setattr("ring_attn_torch.inference.requests.capturing", lambda x: True)
    cache.step(valid=valid)
    with pytest.raises(ValueError, match="the cache is full: request 0 has 6 tokens"):
        cache.step()


def test_too_high_counts_of_the_host_are_corrected_before_a_cache_is_called_full():
    cache = small(capacity=6)
    none = torch.zeros(2, 2, dtype=torch.bool)
    for _ in range(5):
        step = cache.step(2, valid=none)
        for layer in range(2):
            cache.append(layer, torch.ones(2, 2, 2, 8), torch.ones(2, 2, 2, 8), step)
        cache.advance(step)
    assert filled(cache, 6).lengths.tolist() == [6, 6]


def test_evicted_keys_are_gone_from_memory_and_reset_ones_from_sight():
    cache = filled(small(), 3)
    assert cache.reset(0).lengths.tolist() == [0, 3]
    assert cache.k[:, 0, :3].all()
    cache.evict(1)
    assert not cache.k[:, 1].any()
    assert not cache.v[:, 1].any()
    assert (cache.positions == -1).all()
