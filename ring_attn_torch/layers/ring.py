"""The constructor arguments that layers and models share: the ring, the sizes and the dtype of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.plan.balanced_layout import BalancedLayout

from ..call.prepare import dtype_name
from ..data.layout import positions
from ..ring.groups import group_name, group_of, rank_in, ranks_of, ring_of


@dataclass(frozen=True, kw_only=True)
class LayerRing:
    """The ring of a layer or model, and the way its attention runs. The fields are arguments of ``ring_attention``."""

    layout: str = "zigzag"
    group: dist.ProcessGroup | DeviceMesh | None = None
    strategy: str = "auto"
    order: str = "ring"
    backend: str = "auto"
    deterministic: bool = False

    @property
    def ranks(self) -> int:
        return ranks_of(ring_of(self.group))

    def positions(self, tokens: int, device: torch.device | None = None, layout: BalancedLayout | None = None) -> Tensor:
        """Return the global positions, int32 [tokens], of this rank's shard; a balanced ``layout`` ignores ``tokens``."""
        ring = ring_of(self.group)
        if isinstance(layout, BalancedLayout):
            return positions(layout, ranks_of(ring), layout.length, rank_in(ring)).to(device)
        held = positions(layout or self.layout, ranks_of(ring), tokens * ranks_of(ring), rank_in(ring)).to(device)
        return held[:tokens]  # longer if the layout cannot split ``tokens`` equally, which ring_attention refuses on all ranks

    def __getstate__(self) -> dict[str, Any]:
        """Return the object's state with the group's name in place of the group, which cannot be copied or pickled."""
        return self.__dict__ | {"group": None if self.group is None else group_name(self.group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"group": None if state["group"] is None else group_of(state["group"])})


@dataclass(frozen=True, kw_only=True)
class ContiguousRing(LayerRing):
    layout: str = field(default="contiguous", init=False)
    order: str = field(default="ring", init=False)


@dataclass(frozen=True, kw_only=True)
class LayerArguments:
    """The constructor arguments of a layer: ``dim`` and ``heads`` by position, and a dtype in place of its name."""

    dim: int = field(kw_only=False)
    heads: int = field(kw_only=False)
    kv_heads: int | None = None
    head_dim: int | None = None
    param_dtype: torch.dtype | str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "param_dtype", dtype_name(self.param_dtype))
