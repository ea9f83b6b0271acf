"""Plays a story of parity_tests/support/stories.py with ring_attn_torch, on a ring of gloo processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ring_attn_torch import KVCache, prefill

from ..support.stories import Append, Call, Prefill, Story
from .models import Group, rank_in


def on_rank(group: Group, story: Story) -> list[dict[str, Any]]:
    """What one rank has after every operation, and the attention of prefill and the parts of a step in it."""
    cache = KVCache.make(story.sizes, story.batch, story.capacity, **story.options, group=group)
    played = []
    for operation, numbers in story.script():
        got: dict[str, Any] = {}
        if isinstance(operation, Call):
            cache = getattr(cache, operation.name)(*operation.arguments)
        elif isinstance(operation, Prefill):
            arguments = (operation.tokens, story.layout, operation.lengths)
            step = cache.prefill_step(*arguments, rows=operation.rows, fresh=operation.fresh)
            features = {name: torch.from_numpy(x) if name == "sinks" else x for name, x in story.features.items()}
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
