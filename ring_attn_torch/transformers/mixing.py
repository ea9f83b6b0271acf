"""Detection of layers that mix tokens without calling ring attention, in the first forward of a model. Such models are refused.

A layer without attention, such as a plain MLP layer, does not call ring attention either, and is correct on a shard. To
distinguish the two, the layer runs once more on hidden states in which two tokens are NaN: in a layer that mixes tokens, NaN
spreads to others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .masks import asked, current
from .models import text_config


def layers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder and encoder layers of ``model`` by name, without layers inside of layers.

    They are transformers' checkpointable layers or, in models of other authors, the modules of a list as long as
    ``num_hidden_layers``.
    """
    depth = getattr(text_config(model.config), "num_hidden_layers", None)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if isinstance(module, GradientCheckpointingLayer):
            found[name] = module
        elif isinstance(module, nn.ModuleList) and len(module) == depth:
            found |= {f"{name}.{i}": layer for i, layer in enumerate(module)}
    return found


class MixingLayers:
    """Hooks on the first forward of the layers of ``model``, and the names of those that mix tokens without the ring."""

    def __init__(self, model: nn.Module, inside: PreTrainedModel) -> None:
        self.inside = inside
        self.names: list[str] = []
        self.handles: list[Any] = []
        self.again = False
        compiled = [m for m in model.modules() if isinstance(m, OptimizedModule) or m._compiled_call_impl is not None]
        if not compiled:
            for name, layer in layers_of(inside).items():
                self._watch(name, layer)

    def _watch(self, name: str, layer: nn.Module) -> None:
        """Register hooks that compare the count of ring attention calls before and after a forward of ``layer``."""
        before: list[int] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.again and current() is not None:
                before.append(asked())

        def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self.again and before and before.pop() == asked() and self._mixes(layer, args, kwargs):
                self.names.append(f"{name} ({type(layer).__name__})")

        self.handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        self.handles.append(layer.register_forward_hook(leave, with_kwargs=True))

    def _mixes(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if a token of ``layer``'s output depends on other tokens, or if this cannot be tested."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.ndim < 2 or hidden.shape[-2] < 3:
            return True
        tokens = hidden.shape[-2]
        spoilt = torch.zeros(tokens, dtype=torch.bool, device=hidden.device)
        spoilt[[tokens // 3, tokens // 2]] = True
        hidden = hidden.detach().masked_fill(spoilt[:, None], float("nan"))
        args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})
        modes = {module: module.training for module in layer.modules()}
        self.again = True
        try:
            with torch.no_grad():
                output = layer.eval()(*args, **kwargs)
            result = output if isinstance(output, Tensor) else output[0]
            return result.shape != hidden.shape or bool(result[..., ~spoilt, :].isnan().any())
        except Exception:  # any error that NaN causes in a layer
            return True
        finally:
            self.again = False
            for module, training in modes.items():
                module.training = training

    def forget(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def end(self) -> None:
        """Remove the hooks. Raise ValueError, with their names, if layers mix tokens and never called ring attention."""
        self.forget()
        if self.names:
            some = ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if len(self.names) > 3 else "")
            raise ValueError(
                f"{type(self.inside).__name__} has layers that mix tokens and never call attn_implementation, {some}: each rank "
                "would compute them within its shard, so the model does not run over a ring. Run it unsharded"
            )
