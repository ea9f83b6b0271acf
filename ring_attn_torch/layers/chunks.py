"""Something done to every token by itself, for a chunk of a rank's tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ring_attn_core.model.chunks import even_chunk


def in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, chunk: int) -> Tensor:
    """``function(x)`` for x [b s ...], made of ``function`` of at most ``chunk`` tokens at a time and recomputed in the backward.

    So what ``function`` holds inside is there for one chunk only, forward and backward. The gradients of weights are added up
    over chunks in the weights' dtype. Of tokens that fit one chunk nothing is recomputed.

    Inside of what torch.utils.checkpoint computes again, ``function`` runs no more often than without chunks: once forward, and
    once for the backward. That needs the chunks only, so they are kept before the first of them is computed, and checkpoint,
    which stops where it has found the last tensor that is kept, stops here.
    """
    from torch.utils.checkpoint import checkpoint  # takes a while to import

    if x.shape[1] <= chunk:
        return function(x)
    parts = x.split(even_chunk(x.shape[1], chunk), 1)
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in parts], 1)
    if torch.compiler.is_compiling():  # the compiler sees all of it, and decides what is computed again
        return torch.cat([checkpoint(function, part, use_reentrant=False, preserve_rng_state=False) for part in parts], 1)
    kept = [Kept(part) for part in parts]
    apply = lambda part: checkpoint(lambda: function(part()), use_reentrant=False, preserve_rng_state=False)
    with saved_tensors_hooks(_itself, _itself):  # in PyTorch 2.11 checkpoint keeps an empty tensor a chunk
        return torch.cat([apply(part) for part in kept], 1)


class Kept:
    """A tensor, kept as autograd keeps one for a backward: by the hooks that are set where this is made."""

    def __init__(self, x: Tensor) -> None:
        self._first: Tensor | None = x
        self._node = _Keep.apply(torch.empty(0, requires_grad=True), x)

    def __call__(self) -> Tensor:
        """Return the tensor itself at first, and from then on what the hooks give back."""
        x, self._first = self._first, None
        return self._node.grad_fn.saved_tensors[0] if x is None else x


class _Keep(torch.autograd.Function):
    """A node that keeps a tensor and takes no part in any gradient."""

    @staticmethod
    def forward(ctx: Any, node: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty(0)


def _itself(x: Tensor) -> Tensor:
    return x
