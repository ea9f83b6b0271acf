"""The mask function that transformers calls in place of its own.

It returns masks as bands and intervals, never as arrays of tokens by tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ring_attn_core.masks import causal, full

from ..ring.groups import group_name, group_of, ranks_of
from .cached_call import CachedCall, CachedMask
from .global_batch import GlobalBatch, LayerMask, ModelRing
from .pattern import MaskFunction, NoWindow, Pattern, candidates, fits, intervals

NAME = "ring"
"""The value of ``attn_implementation``."""


class _BatchStack(threading.local):
    """The global sequences of a thread's calls in progress, the innermost last.

    ``asked``: the number of times that layers have called ring attention in this thread.
    """

    def __init__(self) -> None:
        self.open: list[GlobalBatch | CachedCall] = []
        self.asked = 0


_calls = _BatchStack()


@contextmanager
def during(whole: GlobalBatch | CachedCall) -> Iterator[None]:
    """Set ``whole`` as the sequence of this thread's masks inside this ``with``."""
    _calls.open.append(whole)
    try:
        yield
    finally:
        _calls.open.pop()


def current() -> GlobalBatch | CachedCall | None:
    """Return the sequence of this thread's innermost call in progress, or None."""
    return _calls.open[-1] if _calls.open else None


def ask() -> None:
    """Count a layer's call of ring attention."""
    if not torch.compiler.is_compiling():
        _calls.asked += 1


def asked() -> int:
    """Return the number of times that layers of this thread have called ring attention."""
    return _calls.asked


def ring_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    config: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **others: Any,
) -> LayerMask | CachedMask | NoWindow:
    """Return the mask of one kind of layer, as called by transformers' create_causal_mask and similar functions, with keywords.

    Raise ValueError with another cache than the ring's, with cross attention, outside of ``sequence_parallel`` on several ranks,
    or if the mask is not one of the patterns in ``pattern.py``.
    """
    offset, whole = others.get("q_offset", 0), current()
    goes_on = isinstance(whole, CachedCall)  # from a cache, which reports kv_length as if it were empty
    if kv_length != q_length or (isinstance(offset, int) and offset != 0 and not goes_on) or others.get("kv_offset", 0):
        raise ValueError(
            f'attn_implementation="ring" got {q_length} queries and {kv_length} keys: cross attention and '
            "caches of other kinds do not run over a ring. Generate inside sequence_parallel, which keeps a cache of its own, "
            "without cache, past_key_values, cache_implementation and use_cache"
        )
    if local_size is not None and local_size < 1:
        return NoWindow(local_size)
    tried = candidates(local_size, "allow_is_bidirectional_skip" in others, getattr(config, "attention_chunk_size", None))
    if whole is None:
        return _alone(mask_function, attention_mask, tried, local_size, (others["batch_size"], q_length))
    if torch.compiler.is_compiling():
        if others.get("use_vmap"):
            raise ValueError(_unknown(config))
        return whole.seen(tried[0])
    for pattern in tried:
        if fits(pattern, mask_function, local_size, q_length, whole.device):
            return whole.seen(pattern)
    raise ValueError(_unknown(config))


def _unknown(config: Any) -> str:
    return (
        f'attn_implementation="ring" does not know a mask of {type(config).__name__}: it is neither causal nor full, no window '
        "and no chunks, perhaps with blocks or a prefix of its own. Such models run with another attn_implementation, unsharded"
    )


def check_alone() -> None:
    """Raise ValueError outside of ``sequence_parallel`` if the default group has several ranks."""
    if ranks_of(group_of(group_name(None))) > 1:
        raise ValueError(
            'attn_implementation="ring" was called outside of sequence_parallel on a group of several ranks: write "with '
            'ring_attn_torch.transformers.sequence_parallel(model):" around model(...), which shards whole input_ids, labels, '
            "attention_mask and position_ids; a forward that is not called through model(...) does not run in it, nor does "
            "another model that was made inside, of model.config: make that before you enter"
        )


def _alone(
    function: MaskFunction, attention_mask: Tensor | None, tried: list[Pattern], size: int | None, shape: tuple[int, int]
) -> LayerMask:
    """Return the mask if one device holds the global sequence, outside of ``sequence_parallel``."""
    check_alone()
    (batch, tokens), ring = shape, ModelRing(group_of(group_name(None)), "contiguous")
    device = torch.device("cpu") if attention_mask is None else attention_mask.device
    key_mask = None if attention_mask is None else attention_mask[:, :tokens].bool()
    for pattern in tried:
        if not pattern.chunk and fits(pattern, function, size, tokens, device):
            return LayerMask(ring, pattern.band, tokens, None, key_mask)
    extents = intervals(function, batch, tokens, device)
    if extents is None:
        raise ValueError(_unknown(None))
    ahead = bool((extents[..., 1] > torch.arange(1, tokens + 1, device=device)).any())
    return LayerMask(ring, full() if ahead else causal(), tokens, extents, key_mask)
