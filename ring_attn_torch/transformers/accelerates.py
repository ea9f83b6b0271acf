"""What accelerate hangs on a model that it prepares for context parallelism of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

HOOK = "_attach_context_parallel_hooks.<locals>._self_attn_pre_forward_hook"
"""The name of the function that takes every layer's mask away and says is_causal=True instead."""


class AcceleratesHooks:
    """The hooks of a model's layers by which accelerate takes their masks away, which say on a ring who sees whom."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.taken: list[tuple[nn.Module, int, Any]] = []

    def take_off(self) -> None:
        """Take them off. Called before each call, since an Accelerator prepares models on its own time."""
        for module in self.model.modules():
            for key, hook in list(module._forward_pre_hooks.items()):
                if getattr(hook, "__qualname__", "") == HOOK:
                    del module._forward_pre_hooks[key]
                    self.taken.append((module, key, hook))

    def restore(self) -> None:
        """Hang them back, in front of all others as they were."""
        for module, key, hook in self.taken:
            others = dict(module._forward_pre_hooks)
            module._forward_pre_hooks.clear()
            module._forward_pre_hooks.update({key: hook, **others})
        self.taken.clear()
