"""Activation checkpointing of a block: the backward recomputes the block, but not its ring attention.

A block saves only its inputs and attention's (out, lse). In float32 and float64 it also saves the rounding error of lse, in one
tensor with lse. The block runs under torch.utils.checkpoint. In the first run a context manager of this module stores each (out,
lse). In the recomputation another context manager returns them to attention. Under torch.compile, selective checkpointing saves
(out, lse) instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..attend.state import State
from ..call.autograd import StoredResults

Function = Callable[..., Tensor]
"""A function of a block's input and of arguments that all blocks share, tensors or other values. All are positional."""

Fetch = Callable[[], Tensor]
"""A function that returns a stored tensor."""


def recompute(function: Function, *inputs: object) -> Tensor:
    """Return ``function(*inputs)``, saving only the inputs and attention's (out, lse), on the device."""
    if torch.compiler.is_compiling():
        saved = partial(create_selective_checkpoint_contexts, [torch.ops.ring_attn.forward.default])
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=saved)
    stay = lambda tensor: lambda: tensor
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=partial(contexts, stay))


def contexts(put: Callable[[Tensor], Fetch]) -> tuple[StoredResults, StoredResults]:
    """Return contexts for the first run of ``checkpoint``, which stores (out, lse) by ``put``, and for its recomputation."""
    stored: list[tuple[Fetch, Fetch]] = []
    return RecordPass(put, stored), ReplayPass(stored)


class RecordPass(StoredResults):
    """The context manager of a block's first run. It stores the (out, lse) of each attention call."""

    def __init__(self, put: Callable[[Tensor], Fetch], stored: list[tuple[Fetch, Fetch]]) -> None:
        super().__init__()
        self._put, self._stored = put, stored

    def store(self, total: State) -> None:
        out, lse, rest = total
        lse_pair = lse[None] if rest is None else torch.stack((lse, rest))
        self._stored.append((self._put(out.detach()), self._put(lse_pair.detach())))


class ReplayPass(StoredResults):
    """The context of a block's recomputation. It returns the stored (out, lse) in order of the calls, anew at each entry."""

    def __init__(self, stored: list[tuple[Fetch, Fetch]]) -> None:
        super().__init__()
        self._stored, self._at = stored, 0

    def __enter__(self) -> None:
        self._at = 0
        super().__enter__()

    def known(self) -> State | None:
        if self._at == len(self._stored):
            return None
        out, lse_pair = self._stored[self._at]
        self._at += 1
        return State(out().detach(), *lse_pair().detach().unbind())
