"""Hooks that accelerate registers on a model that it prepares for its own context parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

HOOK = "_attach_context_parallel_hooks.<locals>._self_attn_pre_forward_hook"
"""The name of the hook function that removes every layer's mask and passes is_causal=True instead."""


class AccelerateHooks:
    """The hooks by which accelerate removes the masks of a model's layers, which a ring needs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.taken: list[tuple[nn.Module, int, Any]] = []

    def take_off(self) -> None:
        """Remove the hooks. Called before each call of the model, because an Accelerator may prepare it at any time."""
        for module in self.model.modules():
            for key, hook in list(module._forward_pre_hooks.items()):
                if getattr(hook, "__qualname__", "") == HOOK:
                    del module._forward_pre_hooks[key]
                    self.taken.append((module, key, hook))

    def restore(self) -> None:
        """Restore the hooks, in front of all others as before."""
        for module, key, hook in self.taken:
            others = dict(module._forward_pre_hooks)
            module._forward_pre_hooks.clear()
            module._forward_pre_hooks.update({key: hook, **others})
        self.taken.clear()
