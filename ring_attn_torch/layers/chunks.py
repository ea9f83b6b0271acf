"""Something done to every token by itself, for a chunk of a rank's tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ring_attn_core.model.chunks import even_chunk


def in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, chunk: int) -> Tensor:
    """``function(x)`` for x [b s ...], made of ``function`` of at most ``chunk`` tokens at a time and recomputed in the backward.

    So what ``function`` holds inside is there for one chunk only, forward and backward. The gradients of weights are added up
    over chunks in the weights' dtype. Of tokens that fit one chunk nothing is recomputed.
    """
    from torch.utils.checkpoint import checkpoint  # takes a while to import

    if x.shape[1] <= chunk:
        return function(x)
    parts = x.split(even_chunk(x.shape[1], chunk), 1)
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in parts], 1)
    return torch.cat([checkpoint(function, part, use_reentrant=False, preserve_rng_state=False) for part in parts], 1)
