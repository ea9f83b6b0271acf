"""Token generation from prompts: prefill in chunks, then one step per new token."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ring_attn_core.model.generation import Generation, OnToken, Progress, answers, check_functions

from ..call.autograd import no_autocast
from ..ring.agreement import AgreedCall, agree, same_error
from ..ring.groups import ranks_of, ring_of
from .cache import KVCache
from .decode_loop import DecodeLoop
from .forward import Decoder, check_model, computes_in, last_hidden


def generate_tokens(
    model: Decoder, arguments: dict[str, Any], on_token: OnToken | None = None, progress: Progress | None = None
) -> list[list[int]]:
    group = model.ring.group
    ring, device = ring_of(group), model.embed.weight.device
    with same_error(ring):
        check_model(model)
        generation = Generation.of(model.config, computes_in(model), **arguments)
        check_functions(on_token, progress)
    alike = tuple(generation.fingerprint().items())
    agree(AgreedCall("RingTransformer.generate", device.type, alike, each_time=True), ring)
    sizes = generation.cache(model.ring.layout, ranks_of(ring))
    cache = KVCache.make(model.config, len(generation.prompts), **sizes, dtype=generation.cache_dtype, group=group, device=device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.no_grad(), no_autocast(device.type), on_device:
        loop = DecodeLoop(model, cache, generation)
        loop.begin(_prefill(model, cache, generation, progress))
        return answers(loop, generation, on_token)


def _prefill(model: Decoder, cache: KVCache, generation: Generation, progress: Progress | None) -> torch.Tensor:
    """Prefill the prompts. Return their last tokens' hidden states [requests, dim], 0 on ranks that do not hold the token."""
    device, hidden, done = cache.counts.device, None, 0
    for start, lengths, tokens in generation.chunks():
        ids = torch.tensor(generation.ids(start, tokens), device=device)
        last = last_hidden(model, ids, cache, lengths)
        ends = torch.tensor([start < n <= start + tokens for n in generation.lengths], device=device)
        hidden = torch.where(ends[:, None], last, torch.zeros_like(last) if hidden is None else hidden)
        done += sum(lengths)
        if progress is not None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # so that progress counts finished work, not launched work
            progress(done, generation.total)
    assert hidden is not None
    return hidden
