"""The selection of the activations that a transformer's blocks save for the backward: keep, recompute or offload."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ring_attn_core.model.checks import check_activations

Caller = Callable[..., Tensor]
"""A function ``call(function, x, *shared)`` that returns ``function(x, *shared)`` and limits the tensors saved for the backward.
"""


def caller(activations: str) -> Caller | None:
    """Return the ``Caller`` for the blocks of one forward pass, or None if autograd is to save all tensors as usual."""
    check_activations(activations)
    if activations == "keep" or not torch.is_grad_enabled():
        return None
    if activations == "recompute":
        from .recompute import recompute

        return recompute
    from .offload import OffloadedTensors, offload  # imports torch._dynamo

    return partial(offload, OffloadedTensors())
