"""Activation checkpointing of transformers' models over a ring, in which layers also save attention's (out, lse)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..layers.offload import OffloadedTensors, offloaded
from ..layers.recompute import Function, recomputed

FUNCTION = "_gradient_checkpointing_func"
"""The attribute in which transformers stores a layer's checkpoint function."""


class Checkpointing:
    """The layers of a model that support checkpointing, and their checkpoint functions before ``keep_attention``.

    After ``activation_checkpointing_enable(offload=True)``, all tensors that they save wait in host memory.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.before: dict[nn.Module, Any] = {}
        self.host = OffloadedTensors()

        def offloading(function: Function, x: Tensor, *shared: object) -> Tensor:
            return offloaded(self.host, function, x, *shared)

        self.ours = (recomputed, offloading)

    def keep_attention(self) -> None:
        """Make the layers save attention's (out, lse).

        Called before each call of the model, because a Trainer may set checkpointing at any time.
        """
        self.host = OffloadedTensors()
        for layer in self.layers:
            function = layer.__dict__.get(FUNCTION, recomputed)
            if function not in self.ours:
                self.before[layer] = function
                setattr(layer, FUNCTION, self.ours[_offloads(function)])

    def restore(self) -> None:
        """Restore the checkpoint functions that were set last."""
        for layer, function in self.before.items():
            if layer.__dict__.get(FUNCTION) in self.ours:
                setattr(layer, FUNCTION, function)


def _offloads(function: Any) -> bool:
    """Return True if layers were set to save on the host: transformers then wraps torch's checkpoint in a function of its own."""
    return getattr(function, "func", function) is not checkpoint
