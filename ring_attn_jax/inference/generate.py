"""Token generation from prompts: prefill in chunks, then one step per new token."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import jax
import numpy as np

from ring_attn_core.model.generation import Generation, OnToken, Progress, answers, bucket, check_functions

from .cache import KVCache
from .decode_loop import DecodeLoop, PlacedModel, Prefilled
from .forward import check_model, computes_in
from .rank_model import Decoder


def generate_tokens(
    model: Decoder, arguments: dict[str, Any], on_token: OnToken | None = None, progress: Progress | None = None
) -> list[list[int]]:
    check_model(model)
    generation = Generation.of(model.config, computes_in(model), **arguments)
    check_functions(on_token, progress)
    _agree(generation)
    placed = PlacedModel.of(model)
    where: dict[str, Any] = {"mesh": placed.mesh, "axis_name": placed.axis_name}
    sizes = generation.cache(model.ring.layout, placed.mesh.shape[placed.axis_name], bucket)
    cache = KVCache.make(model.config, len(generation.prompts), **sizes, dtype=generation.cache_dtype, **where)
    hidden, cache = _prefill(placed, cache, generation, progress)
    loop = DecodeLoop(placed, cache, generation)
    loop.begin(hidden)
    return answers(loop, generation, on_token)


def _prefill(placed: PlacedModel, cache: KVCache, generation: Generation, progress: Progress | None) -> tuple[jax.Array, KVCache]:
    """Prefill the prompts into the cache. Return the hidden states [requests, dim] of their last tokens, and the cache."""
    dtype = generation.config.compute_dtype or generation.config.param_dtype
    hidden, done = placed.put(np.zeros((len(generation.prompts), generation.config.dim), dtype)), 0
    for start, lengths, tokens in generation.chunks(bucket):
        ids = np.asarray(generation.ids(start, tokens), np.int32)
        ends = np.asarray([start < n <= start + max(lengths) for n in generation.lengths])
        chunk = placed.put((ids, np.asarray(lengths, np.int32), ends))
        equal = tokens if set(lengths) == {tokens} else None  # each other length would need a compilation
        hidden, cache = placed.program(Prefilled(equal, not start))(placed.weights, cache, (hidden, chunk))
        done += sum(lengths)
        if progress is not None:
            hidden.block_until_ready()  # else progress would count dispatched work as done
            progress(done, generation.total)
    return hidden, cache


def _agree(generation: Generation) -> None:
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    digest = blake2b(json.dumps(generation.fingerprint()).encode(), digest_size=16).digest()
    digests = np.asarray(multihost_utils.process_allgather(np.frombuffer(digest, np.uint8)))
    others = [process for process, each in enumerate(digests) if not np.array_equal(each, digests[0])]
    if others:
        raise ValueError(
            f"process {others[0]} was given other prompts or arguments than process 0: pass the same to generate in every process"
        )
