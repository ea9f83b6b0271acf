"""LoRA (``ring_attn_core/model/lora.py``) of a RingTransformer: add adapters, merge them into the weights, save them for peft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attn_core.model.lora import LoRA, write_adapters

from ..attend.tiles import accumulation_dtype
from ..layers.parts import LinearMap
from ..layers.transformer import RingTransformer
from ..ring.groups import Group, is_dtensor, rank_in
from .ranks import run_on_all
from .weights import _place, reshard


class Adapter(nn.Module):
    """The map of x [..., in] to ``scale (x a^T) b^T`` [..., out], in x's or autocast's dtype; a [rank, in], b [out, rank]."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a), nn.Parameter(b), scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a.to(x.dtype)) * self.scale, self.b.to(x.dtype))


def add_adapters(model: RingTransformer, lora: LoRA, first: Mapping[str, tuple[Any, Any]]) -> None:
    """Freeze ``model``, and add adapters (a [rank, in], b [out, rank]), in at least float32, before FSDP shards it."""
    model.requires_grad_(False)
    for name, arrays in first.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, LinearMap)
        like_weight = {"dtype": accumulation_dtype(linear.weight.dtype), "device": linear.weight.device}
        a, b = (torch.tensor(x, **like_weight) for x in arrays)
        linear.adapter = Adapter(a, b, lora.scale)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add ``scale b a`` to each weight with an adapter, and remove the adapters. All ranks that shard weights must call it."""
    reshard(model)
    for _, linear, adapter in list(_find_adapted(model)):
        weight = linear.get_parameter("weight")
        delta = adapter.scale * _whole(adapter.b) @ _whole(adapter.a)
        weight.copy_(_place((_whole(weight).to(delta.dtype) + delta).to(weight.dtype), weight))
        linear.adapter = None


def save_adapters(model: nn.Module, lora: LoRA, folder: str | Path, base: str | None, group: Group) -> None:
    """Save the adapters in the format of peft; each rank must call it. ``base``: the base model's folder or name, or None."""
    from safetensors.torch import save_file

    with torch.no_grad():
        whole = {name: tuple(_whole(x).cpu() for x in (each.a, each.b)) for name, _, each in _find_adapted(model)}
    first = group is None or rank_in(group) == 0
    run_on_all("saving adapters", lambda: write_adapters(folder, lora, whole, base, save_file) if first else None, group)  # type: ignore[arg-type]


def _find_adapted(model: nn.Module) -> Iterator[tuple[str, LinearMap, Adapter]]:
    for name, module in model.named_modules():
        if isinstance(module, LinearMap) and isinstance(module.adapter, Adapter):
            yield name, module, module.adapter


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if is_dtensor(x) else x  # type: ignore[operator]
