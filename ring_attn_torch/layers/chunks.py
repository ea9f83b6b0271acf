"""Per-token functions, applied to one chunk of a rank's tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ring_attn_core.model.chunks import even_chunk


def in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, chunk: int) -> Tensor:
    """Compute ``function(x)`` for x [b s ...] in chunks of at most ``chunk`` tokens, which the backward recomputes. Gradients of
    weights accumulate over chunks in the weights' dtype. The recomputation of an outer torch.utils.checkpoint stops at the last
    tensor that it saved: the last chunk of x. So only the inner checkpoints run ``function`` again."""
    from torch.utils.checkpoint import checkpoint  # takes a while to import

    if x.shape[1] <= chunk:
        return function(x)
    parts = x.split(even_chunk(x.shape[1], chunk), 1)
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in parts], 1)
    if torch.compiler.is_compiling():  # the compiler decides what is recomputed
        return torch.cat([checkpoint(function, part, use_reentrant=False, preserve_rng_state=False) for part in parts], 1)
    stored = [SavedTensor(part) for part in parts]
    apply = lambda part: checkpoint(lambda: function(part()), use_reentrant=False, preserve_rng_state=False)
    with saved_tensors_hooks(_itself, _itself):  # checkpoint of PyTorch 2.11 saves an empty tensor per chunk
        return torch.cat([apply(part) for part in stored], 1)


class SavedTensor:
    """A tensor that autograd saves for the backward. Saved-tensor hooks that are active at its creation pack and unpack it."""

    def __init__(self, x: Tensor) -> None:
        self._first: Tensor | None = x
        self._node = _SaveTensor.apply(torch.empty(0, requires_grad=True), x)

    def __call__(self) -> Tensor:
        """Return the original tensor in the first call (the forward). Return the tensor that the hooks unpack in later calls."""
        x, self._first = self._first, None
        return self._node.grad_fn.saved_tensors[0] if x is None else x


class _SaveTensor(torch.autograd.Function):
    """An autograd node that only saves ``x``. No computation uses its output, so it needs no backward."""

    @staticmethod
    def forward(ctx: Any, node: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty(0)


def _itself(x: Tensor) -> Tensor:
    return x
