"""Blocks that keep their input and attention's (out, lse) alone; their backward computes the rest again, without the ring.

torch.utils.checkpoint computes it again. What is here hands out the (out, lse) meanwhile, and says where tensors wait: on the
device, or in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ring_attn_core.model.activations import check_activations

from ..attend.state import State
from ..op import Keeping
from .offload import Host

Caller = Callable[..., Tensor]
"""Takes a function, the input of a block and what all blocks share, and calls it; keeps as little as was asked for."""

Fetch = Callable[[], Tensor]
"""Returns a tensor that waits somewhere."""


def caller(activations: str) -> Caller | None:
    """Return what calls the blocks of one forward pass; None where they keep all, or where nobody wants gradients.

    ``activations``: "keep", "recompute" or "offload"; ValueError for anything else.
    """
    check_activations(activations)
    if activations == "keep" or not torch.is_grad_enabled():
        return None
    return recomputed if activations == "recompute" else partial(offloaded, Host())


def recomputed(function: Callable[..., Tensor], x: Tensor, *shared: Any) -> Tensor:
    """Return ``function(x, *shared)``; x and attention's (out, lse) stay on the device."""
    if torch.compiler.is_compiling():
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.ring_attn.forward.default])
        return checkpoint(function, x, *shared, use_reentrant=False, context_fn=contexts)
    stay = lambda tensor: lambda: tensor
    return checkpoint(function, x, *shared, use_reentrant=False, context_fn=partial(_contexts, stay))


@torch.compiler.disable(reason='activations="offload" copies on a stream of its own, which torch.compile does not follow')
def offloaded(host: Host, function: Callable[..., Tensor], x: Tensor, *shared: Any) -> Tensor:
    """Return ``function(x, *shared)``; x and attention's (out, lse) wait in host memory."""
    host.begin()
    place, shape = x.data_ptr(), x.shape

    def pack(tensor: Tensor) -> Tensor | Fetch:
        return host.put(tensor) if tensor.shape == shape and tensor.data_ptr() == place else tensor

    def unpack(kept: Tensor | Fetch) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    with saved_tensors_hooks(pack, unpack):  # for x alone: inside, checkpoint has hooks of its own
        return checkpoint(function, x, *shared, use_reentrant=False, context_fn=partial(_contexts, host.put))


def _contexts(put: Callable[[Tensor], Fetch]) -> tuple[Keeping, Keeping]:
    """What a function runs in for the first time, and again: each (out, lse) goes to ``put``, and comes back."""
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
