"""The function that runs a transformer's blocks for each value of ``activations``: keep, recompute or offload."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ring_attn_core.model.activations import check_activations

Caller = Callable[..., Tensor]
"""A function that calls a block's function on its input and the shared arguments, and limits what is stored for the backward."""


def caller(activations: str) -> Caller | None:
    """Return the function that runs the blocks of one forward pass, or None if they are called directly.

    ``activations``: "keep", "recompute" or "offload". None is returned for "keep" and when gradients are disabled. Raise
    ValueError if ``activations`` has another value.
    """
    check_activations(activations)
    if activations == "keep" or not torch.is_grad_enabled():
        return None
    if activations == "recompute":
        from .recompute import recomputed

        return recomputed
    from .offload import OffloadedTensors, offloaded  # imports torch._dynamo

    return partial(offloaded, OffloadedTensors())
