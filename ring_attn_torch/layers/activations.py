"""Who calls the blocks of a transformer, by what they are to keep for their backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ring_attn_core.model.activations import check_activations

Caller = Callable[..., Tensor]
"""Takes a function, the input of a block and what all blocks share, and calls it; keeps as little as was asked for."""


def caller(activations: str) -> Caller | None:
    """Return what calls the blocks of one forward pass; None where they keep all, or where nobody wants gradients.

    ``activations``: "keep", "recompute" or "offload"; ValueError for anything else.
    """
    check_activations(activations)
    if activations == "keep" or not torch.is_grad_enabled():
        return None
    if activations == "recompute":
        from .recompute import recomputed

        return recomputed
    from .offload import Host, offloaded  # it imports torch._dynamo

    return partial(offloaded, Host())
