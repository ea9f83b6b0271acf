"""Steps over a cache in PyTorch: what is none is refused on every rank, and torch.compile leaves them as they stand."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ring_attn_torch import KVCache, RingTransformer, RotaryEmbedding, decode_step, prefill_prompts
from ring_attn_torch.inference import forward
from ring_attn_torch.layers import projections
from ring_attn_torch.layers.rotary import Turns, turns_at

from .models import Group
from .test_generate import message_of, model_of


def test_what_is_no_cache_is_refused_on_every_rank(gloo):
    first, second = gloo(2, no_cache_on_rank)
    assert first == second
    for got, what in zip(first, ("rank 0: ", "rank 0: ", "rank 1: ", "rank 1: "), strict=True):
        assert got == f"{what}cache must be a KVCache, got None: make one with KVCache.make(model.config, ...)"


def no_cache_on_rank(group: Group) -> list[str]:
    """Of calls without a cache on both ranks, then on rank 1 alone."""
    model = model_of("grouped", group)
    kept = KVCache.make(model.config, 2, 24, dtype="float64", group=group)
    ids = torch.ones(2, 5, dtype=torch.int64)
    right = kept if dist.get_rank(group) == 0 else None
    calls = [(function, cache) for cache in (None, right) for function in (decode_step, prefill_prompts)]
    return [message_of(lambda call=call: call[0](model, ids, call[1])) for call in calls]


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

    for module in (forward, projections):
        monkeypatch.setattr(module, "turns_at", counted)
    cache = KVCache.make(model.config, 1, 8, dtype="float64")
    prompt, cache = prefill_prompts(model, ids[:, :6], cache)
    step, _ = decode_step(model, ids[:, 6:], cache)
    assert computed == [100.0, 10.0] * 2
    assert torch.allclose(torch.cat([prompt[:, None], step], 1), whole[:, 5:], rtol=1e-12, atol=1e-12)
