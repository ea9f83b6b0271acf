"""Tests of steps over a cache in PyTorch: every rank refuses a step without one, and torch.compile leaves them as they stand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ring_attn_torch import KVCache, RingAttention, RingTransformer, RotaryEmbedding, decode_step, prefill_prompts
from ring_attn_torch.layers import block, projections, rotary
from ring_attn_torch.layers.rotary import Turns, turns_at

from .models import Group
from .test_generate import message_of, model_of


def test_an_invalid_cache_is_refused_on_every_rank(gloo):
    first, second = gloo(2, no_cache_on_rank)
    assert first == second
    for got, what in zip(first, ("rank 0: ", "rank 0: ", "rank 1: ", "rank 1: "), strict=True):
        assert got == f"{what}cache must be a KVCache, got None: make one with KVCache.make(model.config, ...)"


def no_cache_on_rank(group: Group) -> list[str]:
    """Return the errors of calls without a cache on both ranks, then on rank 1 alone."""
    model = model_of("grouped", group)
    kept = KVCache.make(model.config, 2, 24, dtype="float64", group=group)
    ids = torch.ones(2, 5, dtype=torch.int64)
    right = kept if dist.get_rank(group) == 0 else None
    calls = [(function, cache) for cache in (None, right) for function in (decode_step, prefill_prompts)]
    return [message_of(lambda call=call: call[0](model, ids, call[1])) for call in calls]


@pytest.mark.exhaustive
def test_torch_compile_leaves_a_step_as_it_stands():
    model, ids = model_of("features"), torch.tensor([[3, 1, 4]])

    def program(ids: torch.Tensor, kept: KVCache) -> torch.Tensor:
        prompt, _ = prefill_prompts(model, ids + 1, kept)
        return prompt[:, None] + 2 * decode_step(model, ids, kept)[0]

    caches = [KVCache.make(model.config, 1, 24, dtype="float64") for _ in range(2)]
    compiled = torch.compile(program, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(program(ids, caches[0]), compiled(ids, caches[1]))
    assert caches[1].host_state.lengths == caches[1].lengths.tolist() == [6]


def test_layers_with_the_same_rotary_embedding_share_their_turns(monkeypatch):
    """Each call computes the turns of an embedding once; a whole forward, whose layers compute their own, has the same logits."""
    model = RingTransformer(31, 16, depth=4, heads=2, rotaries=(100.0, None, 10.0, 100.0), param_dtype="float64")
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        whole = model(ids)
    computed: list[float] = []

    def counted(positions: torch.Tensor, embedding: RotaryEmbedding, dtype: torch.dtype) -> Turns:
        computed.append(embedding.rotary.base)
        return turns_at(positions, embedding, dtype)

    for module in (block, projections, rotary):
        monkeypatch.setattr(module, "turns_at", counted)
    cache = KVCache.make(model.config, 1, 8, dtype="float64")
    prompt, cache = prefill_prompts(model, ids[:, :6], cache)
    step, _ = decode_step(model, ids[:, 6:], cache)
    assert computed == [100.0, 10.0] * 2
    assert torch.allclose(torch.cat([prompt[:, None], step], 1), whole[:, 5:], rtol=1e-12, atol=1e-12)


class Halved(RotaryEmbedding):
    """A rotary embedding of a user's own, with half of the positions."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor | Turns) -> torch.Tensor:
        assert isinstance(positions, torch.Tensor)
        return super().forward(x, positions // 2)


def test_a_rotary_embedding_with_a_forward_of_its_own_keeps_it_in_the_whole_forward_and_in_steps():
    model = RingTransformer(31, 16, depth=2, heads=2, param_dtype="float64")
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        plain = model(ids)
        for block in model.modules():
            if isinstance(block, RingAttention):
                block.rotary = Halved(8)
        whole = model(ids)
    assert not torch.allclose(plain, whole)
    cache = KVCache.make(model.config, 1, 6, dtype="float64")
    prompt, cache = prefill_prompts(model, ids[:, :4], cache)
    step, _ = decode_step(model, ids[:, 4:], cache)
    assert torch.allclose(torch.cat([prompt[:, None], step], 1), whole[:, 3:], rtol=1e-12, atol=1e-12)


def test_a_forward_set_on_a_rotary_embedding_gets_positions():
    layer, seen = RingAttention(16, 2), []
    assert layer.rotary is not None
    layer.rotary.forward = lambda x, positions: seen.append(positions.tolist()) or x  # type: ignore[method-assign]
    layer(torch.ones(1, 4, 16))
    assert seen == [[0, 1, 2, 3]] * 2


def test_hooks_of_a_rotary_embedding_run():
    layer, seen = RingAttention(16, 2), []
    assert layer.rotary is not None
    layer.rotary.register_forward_hook(lambda module, given, turned: seen.append(turned.shape))
    layer(torch.ones(1, 4, 16))
    assert seen == [(1, 4, 2, 8)] * 2


def test_a_cache_is_printed_by_its_lengths_and_sizes_and_takes_lengths_in_an_array():
    model = RingTransformer(31, 16, depth=2, heads=2)
    cache = KVCache.make(model.config, 2, 6)
    wrong: Any = np.array([4, 7])
    for lengths in ([4, 2], torch.tensor([4, 2]), wrong - [0, 5]):
        assert cache.check_room(lengths, "zigzag") is cache
    with pytest.raises(ValueError, match="request 1 has 0 tokens, and 7 more exceed the capacity of 6"):
        cache.check_room(wrong)
    _, cache = prefill_prompts(model, torch.ones(2, 4, dtype=torch.int64), cache, torch.tensor([4, 2]))
    assert repr(cache).startswith("KVCache(lengths=[4, 2], CacheSpec(sizes=CacheSizes(layers=2, ")


def test_the_dtype_of_a_cache_is_a_name_or_a_dtype():
    model = RingTransformer(31, 16, depth=2, heads=2)
    texts = [model.generate([[3, 1, 4]], 3, cache_dtype=dtype) for dtype in ("float8_e4m3fn", torch.float8_e4m3fn)]
    assert texts[0] == texts[1]
