"""The ranks that shard a parameter, and FSDP's reduction of its gradient, under FSDP2 and tensor parallelism."""

from __future__ import annotations

import sys
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from ..ring.groups import is_dtensor


class GradientReduction(NamedTuple):
    """FSDP's reduction of a gradient: the sum over ``ranks`` (a tuple for each dim of FSDP's mesh), divided by ``divisor``."""

    ranks: list[tuple[int, ...]]
    divisor: float


def dim_ranks(p: nn.Parameter) -> list[tuple[int, ...]]:
    """Return, for each dim of a DTensor's mesh, the ranks of this rank's process group along that dim; [] for a plain tensor."""
    if not is_dtensor(p):
        return []
    return [ranks_in(p.device_mesh.get_group(dim)) for dim in range(p.device_mesh.ndim)]


def ranks_in(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def reduced_by_fsdp(module: nn.Module) -> dict[nn.Parameter, GradientReduction]:
    """Return the gradient reduction of each parameter that ``fully_shard`` has sharded, from private attributes of FSDP."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # takes a second to import; if not imported yet, it has sharded nothing
    found: dict[nn.Parameter, GradientReduction] = {}
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return found
    for each in module.modules():
        if isinstance(each, fsdp.FSDPModule):
            for group in _groups(each._get_fsdp_state()):  # type: ignore[operator]
                found |= dict.fromkeys((x.sharded_param for x in group.fsdp_params), _reduced(group))
    return found


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _reduced(group: Any) -> GradientReduction:
    kinds = (getattr(group.mesh_info, f"{kind}_process_group", None) for kind in ("shard", "replicate"))
    ranks = [ranks_in(each) for each in kinds if each is not None]
    factor = group.gradient_divide_factor
    return GradientReduction(ranks, float(prod(map(len, ranks)) if factor is None else factor))
