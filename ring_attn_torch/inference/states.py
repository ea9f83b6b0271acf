"""The states of recurrent layers in a cache, all on every rank. The ring computes a chunk of prompts, each rank new tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ring_attn_core.model.recurrence_steps import ARRAYS, EARLIER, STEPS

from ..recurrence.convolution import convolve
from ..recurrence.delta_rule import delta_rule
from ..recurrence.runs import Where
from ..recurrence.state_space import scan
from ..ring.halo import wide
from .cache import KVCache
from .merge import sum_over_ranks
from .step import DecodeStep

States = tuple[Tensor, Tensor]
"""One layer's last tokens before its convolution [batch, taps - 1, channels], and its state [batch, heads, ...]."""


def mix_chunk(mixer: Any, name: str, states: States, cache: KVCache, step: DecodeStep, x: Tensor) -> tuple[Tensor, States]:
    """Return the output of a recurrent layer for this rank's shard x of a chunk of prompts, and the states after the chunk."""
    conv, state = states
    ends = torch.where(step.positions >= 0, 0, EARLIER)
    extents = torch.stack([torch.full_like(ends, EARLIER), ends], -1).int()
    after: list[Tensor] = []

    def where(before: Tensor) -> Where:
        layout = "contiguous" if cache.spec.ranks == 1 else step.layout or ""  # one rank has one run
        return Where(cache.group, layout, max(1, step.length), extents, True, None if step.fresh else before)

    def convolved(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = torch.where(step.positions >= 0, step.positions - step.before[:, None], -1)
        last = sum_over_ranks(last_tokens(y, own, step.chunk, conv.shape[1]), cache.ring)
        after.append(move_on(conv, last.to(conv.dtype), step.chunk))
        return convolve(y, weight, bias, "silu", where(conv.to(y.dtype)))

    def recur(*arrays: Tensor) -> Tensor:
        named = dict(zip(ARRAYS[name], arrays, strict=True))
        out, last = scan(named, where(state)) if name == "mamba2" else delta_rule(named, where(state), normalize=True)
        assert last is not None
        after.append(last)
        return out

    return mixer.mix(x, convolved, recur), (after[0], after[1])


def mix_tokens(mixer: Any, name: str, states: States, valid: Tensor | None, x: Tensor) -> tuple[Tensor, States]:
    """Return the output of a recurrent layer for new tokens x [b s dim], and the states after those that are ``valid``."""
    conv, state = states
    kept = lambda t, new, old: new if valid is None else torch.where(valid[:, t].view(-1, *[1] * (new.ndim - 1)), new, old)

    def convolved(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal conv
        outs = []
        for t in range(y.shape[1]):
            seen = torch.cat([conv.to(y.dtype), y[:, t : t + 1]], 1)
            outs.append((seen * weight.T).sum(1))
            conv = kept(t, seen[:, 1:].to(conv.dtype), conv)
        out = torch.stack(outs, 1)
        return F.silu(out if bias is None else out + bias)

    def recur(*arrays: Tensor) -> Tensor:
        nonlocal state
        outs = []
        for t in range(x.shape[1]):
            new = [each[:, t] if each.ndim > 1 else each for each in map(wide, arrays)]
            out, after = STEPS[name](new, state, torch.exp)
            state = kept(t, after, state)
            outs.append(out)
        return torch.stack(outs, 1).to(arrays[0].dtype)

    return mixer.mix(x, convolved, recur), (conv, state)


def last_tokens(hidden: Tensor, positions: Tensor, lengths: Tensor, keep: int) -> Tensor:
    """Return each row's last ``keep`` tokens [batch, keep, dim] from this rank's ``hidden``, 0 for those on other ranks."""
    wanted = lengths[:, None] - keep + torch.arange(keep, device=lengths.device)
    here = (positions[..., None] == wanted[:, None]) & (positions >= 0)[..., None]
    rows = torch.arange(len(hidden), device=hidden.device)[:, None]
    return torch.where(here.any(1)[..., None], hidden[rows, here.int().argmax(1)], 0)


def move_on(before: Tensor, last: Tensor, lengths: Tensor) -> Tensor:
    """Return the last tokens [batch, keep, dim] after ``lengths`` new ones, whose last are ``last``, 0 before the first."""
    keep = before.shape[1]
    place = (lengths[:, None] + torch.arange(keep, device=last.device))[..., None].expand_as(last)
    return torch.where(place < keep, before.gather(1, place.clamp(max=keep - 1).long()), last) if keep else last
