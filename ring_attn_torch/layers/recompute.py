"""Blocks that keep their input and attention's (out, lse) alone; their backward computes the rest again, without the ring.

torch.utils.checkpoint computes it again. What is here hands out the (out, lse) meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..attend.state import State
from ..op import Keeping

Function = Callable[..., Tensor]
"""Of a block's input and of what all blocks share, None or tensors among it; it is called by positions."""

Fetch = Callable[[], Tensor]
"""Returns a tensor that waits somewhere."""


def recomputed(function: Function, *inputs: object) -> Tensor:
    """Return ``function(*inputs)``; the inputs and attention's (out, lse) stay on the device."""
    if torch.compiler.is_compiling():
        saved = partial(create_selective_checkpoint_contexts, [torch.ops.ring_attn.forward.default])
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=saved)
    stay = lambda tensor: lambda: tensor
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=partial(contexts, stay))


def contexts(put: Callable[[Tensor], Fetch]) -> tuple[Keeping, Keeping]:
    """Return what a function runs in for the first time, and again: each (out, lse) goes to ``put``, and comes back."""
    kept: list[tuple[Fetch, Fetch]] = []
    return First(put, kept), Again(kept)


class First(Keeping):
    """Puts every (out, lse) where it waits."""

    def __init__(self, put: Callable[[Tensor], Fetch], kept: list[tuple[Fetch, Fetch]]) -> None:
        super().__init__()
        self._put, self._kept = put, kept

    def keep(self, total: State) -> None:
        out, lse = total
        self._kept.append((self._put(out.detach()), self._put(lse.detach())))


class Again(Keeping):
    """Fetches every (out, lse), from the first on whenever it is entered."""

    def __init__(self, kept: list[tuple[Fetch, Fetch]]) -> None:
        super().__init__()
        self._kept, self._at = kept, 0

    def __enter__(self) -> None:
        self._at = 0
        super().__enter__()

    def known(self) -> State | None:
        if self._at == len(self._kept):
            return None
        out, lse = self._kept[self._at]
        self._at += 1
        return out().detach(), lse().detach()
