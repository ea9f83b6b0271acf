"""Plays a story of parity_tests/support/stories.py with ring_attn_torch, on a ring of gloo processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ring_attn_torch import CacheSizes, KVCache, prefill
from ring_attn_torch.inference.step import DecodeStep

from ..support.stories import Append, Call, Prefill, Story
from .models import Group, rank_in


def small(**changes: Any) -> KVCache:
    return KVCache.make(CacheSizes(2, 2, 8), 2, **{"capacity": 8, "dtype": "float32"} | changes)


def on_rank(group: Group, story: Story) -> list[dict[str, Any]]:
    """Return one rank's cache after every operation, and the attention of prefill and the parts of a step in it."""
    cache = KVCache.make(story.sizes, story.batch, story.capacity, **story.options, group=group)
    played = []
    for operation, numbers in story.script():
        got: dict[str, Any] = {}
        if isinstance(operation, Call):
            cache = getattr(cache, operation.name)(*operation.arguments)
        elif isinstance(operation, Prefill):
            arguments = (operation.tokens, story.layout, operation.lengths)
            step = cache.prefill_step(*arguments, rows=operation.rows, fresh=operation.fresh)
            features = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in story.of_prefill.items()}
            outs = []
            for layer in range(story.layers):
                new = drawn(story, story.shard(numbers, rank_in(group)), layer)
                out, cache = prefill(*new, cache=cache, layer=layer, step=step, **features)
                outs.append(out)
            got["out"] = as_numpy(torch.stack(outs))
            cache = cache.advance(step)
        else:
            got |= appended(cache, story, operation, numbers)
        got["cache"] = snapshot(cache)
        played.append(got)
    return played


def appended(cache: KVCache, story: Story, operation: Append, numbers: np.ndarray) -> dict[str, Any]:
    valid = None if operation.valid is None else torch.tensor(operation.valid)
    step = cache.step(operation.tokens, valid=valid, rows=operation.rows)
    parts = []
    for layer in range(story.layers):
        cache.append(layer, *drawn(story, numbers, layer)[1:], step=step)
        parts.append(cache.part(layer, step))
    if operation.kept:
        cache.advance(step)
    k, v = (as_numpy(torch.stack([getattr(part, name) for part in parts])) for name in "kv")
    return {"positions": step.positions.numpy(), "part": {"k": k, "v": v, "p": parts[0].k_positions.numpy()}}


def drawn(story: Story, numbers: np.ndarray, layer: int) -> list[torch.Tensor]:
    """q, k, v of the tokens with these numbers."""
    return [torch.from_numpy(story.tokens[name][numbers, layer]).to(getattr(torch, story.compute_dtype)) for name in "qkv"]


def snapshot(cache: KVCache) -> dict[str, np.ndarray]:
    """The arrays of this rank, copied, without the slot that takes what others hold."""
    names = ("k", "v", "positions", "counts", "lengths", "k_scale", "v_scale")
    got = {name: as_numpy(getattr(cache, name)) for name in names}
    slots = cache.spec.slots
    return got | {"k": got["k"][:, :, :slots], "v": got["v"][:, :, :slots], "positions": got["positions"][:, :slots]}


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return (x.double() if x.is_floating_point() else x).cpu().numpy().copy()


def late_on_rank(group: Group, first: str) -> list[dict[str, np.ndarray]]:
    """A float8 cache whose request in row 1 has no token in its first steps and chunk, and one of that request alone.

    ``first``: whether its first token comes in a "chunk", which of two ranks the first one holds, or in a "step".
    """
    sizes = CacheSizes(2, 2, 8)
    late, alone = (KVCache.make(sizes, n, 8, dtype="float8_e4m3fn", group=group) for n in (2, 1))

    def written(cache: KVCache, step: DecodeStep, value: float) -> None:
        real = (step.positions >= 0)[..., None, None].expand(-1, -1, 2, 8)
        new = torch.where(real, value, 1e6)
        for layer in range(2):
            cache.append(layer, new, new, step)
        cache.advance(step)

    written(late, late.prefill_step(2, "contiguous", [0, 0]), 1.0)
    written(late, late.step(2, valid=torch.zeros(2, 2, dtype=torch.bool)), 1.0)
    written(late, late.step(1, valid=torch.zeros(1, 1, dtype=torch.bool), rows=[1]), 1.0)
    for cache, new in ((late, [0, 1]), (alone, [1])):
        if first == "chunk":
            written(cache, cache.prefill_step(2, "contiguous", new), 1.0)
        for value in (1.0, 3.0):
            written(cache, cache.step(1, valid=torch.tensor(new, dtype=torch.bool)[:, None]), value)
    return [snapshot(late), snapshot(alone)]
