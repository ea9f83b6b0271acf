"""Token generation from prompts: prefill in chunks, then one step per new token."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ring_attn_core.model.generation import Answers, Generation, OnToken, Progress, local_tokens

from ..call.autograd import no_autocast
from ..layers.transformer import RingTransformer
from ..ring.agreement import exchange, same_error
from ..ring.groups import ranks_of, ring_of
from .cache import KVCache
from .decode_loop import DecodeLoop
from .forward import check_model, computes_in, last_hidden


def generated(
    model: RingTransformer, arguments: dict[str, Any], on_token: OnToken | None = None, progress: Progress | None = None
) -> list[list[int]]:
    """Return the new tokens of each prompt. Call ``on_token(request, token)`` for each, ``progress(done, total)`` after each
    chunk of a prefill, in prompt tokens."""
    group = model.ring.group
    ring, device = ring_of(group), model.embed.weight.device
    with same_error(ring):
        check_model(model)
        generation = Generation.of(model.config, computes_in(model), **arguments)
        for name, function in (("on_token", on_token), ("progress", progress)):
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be a function or None, got {type(function).__name__}")
    if ring is not None and ranks_of(ring) > 1:
        _agree(exchange("RingTransformer.generate", generation.fingerprint(), ring))
    layout, ranks = model.ring.layout, ranks_of(ring)
    shards = [local_tokens(layout, ranks, lengths) for _, lengths in generation.chunks()]
    sizes = generation.cache(layout, ranks, shards)
    cache = KVCache.make(model.config, len(generation.prompts), **sizes, dtype=generation.cache_dtype, group=group, device=device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.no_grad(), no_autocast(device.type), on_device:
        loop = DecodeLoop(model, cache, generation)
        loop.begin(_prefilled(model, cache, generation, progress))
        return _answered(loop, generation, on_token)


def _prefilled(model: RingTransformer, cache: KVCache, generation: Generation, progress: Progress | None) -> torch.Tensor:
    """Prefill the prompts. Return their last tokens' hidden states [requests, dim], 0 on ranks that do not hold the token."""
    device, hidden, done = cache.counts.device, None, 0
    for start, lengths in generation.chunks():
        ids = torch.tensor(generation.ids(start, max(lengths)), device=device)
        last = last_hidden(model, ids, cache, lengths)
        ends = torch.tensor([0 < n <= start + max(lengths) and n > start for n in generation.lengths], device=device)
        hidden = torch.where(ends[:, None], last, torch.zeros_like(last) if hidden is None else hidden)
        done += sum(lengths)
        if progress is not None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # so that progress counts finished work, not launched work
            progress(done, generation.total)
    assert hidden is not None
    return hidden


def _answered(loop: DecodeLoop, generation: Generation, on_token: OnToken | None) -> list[list[int]]:
    answers, most = Answers(generation, on_token), max(generation.new)
    for number in range(1, most + 1):
        read, more = loop.read(), number < most
        if more and loop.ahead:
            loop.step()
        if answers.take(read()):
            break
        if more and not loop.ahead:
            loop.step()
    return answers.tokens


def _agree(fingerprints: list[dict[str, Any]]) -> None:
    """Raise ValueError if the arguments of ``generate``, by rank and name, differ between ranks."""
    for name, value in fingerprints[0].items():
        others = [rank for rank, what in enumerate(fingerprints) if what[name] != value]
        if others:
            got = "other prompts" if name == "prompts" else f"{name}={fingerprints[others[0]][name]!r}, and rank 0 {value!r}"
            raise ValueError(
                f"rank {others[0]} was given {got}: pass the same prompts and arguments to generate on every rank of the ring"
            )
