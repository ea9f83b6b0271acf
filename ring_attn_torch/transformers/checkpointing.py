"""A model's own activation checkpointing over a ring: what layers keep for their backward includes attention's (out, lse)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..layers.offload import Host, offloaded
from ..layers.recompute import Function, recomputed

FUNCTION = "_gradient_checkpointing_func"
"""Where transformers keeps how a layer computes its forward again."""


class Checkpointing:
    """The layers of a model that can compute their forward again, and how they did before ``keep_attention``.

    Where the model was told ``activation_checkpointing_enable(offload=True)``, all that they keep waits in host memory.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.before: dict[nn.Module, Any] = {}
        self.host = Host()

        def offloading(function: Function, x: Tensor, *shared: object) -> Tensor:
            return offloaded(self.host, function, x, *shared)

        self.ours = (recomputed, offloading)

    def keep_attention(self) -> None:
        """Let them keep attention's (out, lse). Called before each call, since a Trainer sets checkpointing on its own time."""
        self.host = Host()
        for layer in self.layers:
            function = layer.__dict__.get(FUNCTION, recomputed)
            if function not in self.ours:
                self.before[layer] = function
                setattr(layer, FUNCTION, self.ours[_offloads(function)])

    def restore(self) -> None:
        """Let them do as they were told last."""
        for layer, function in self.before.items():
            if layer.__dict__.get(FUNCTION) in self.ours:
                setattr(layer, FUNCTION, function)


def _offloads(function: Any) -> bool:
    """Whether layers were told to save on the host: transformers then puts a function of its own round torch's checkpoint."""
    return getattr(function, "func", function) is not checkpoint
