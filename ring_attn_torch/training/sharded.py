"""Over which ranks a parameter is sharded, and who sums its gradients: FSDP2 and tensor parallelism."""

from __future__ import annotations

import sys
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from ..ring.groups import is_dtensor


class Reduced(NamedTuple):
    """What FSDP does to a gradient: the ranks that it sums over, a set for each dim of its mesh, and what it divides by."""

    ranks: list[tuple[int, ...]]
    divisor: float


def dim_ranks(p: nn.Parameter) -> list[tuple[int, ...]]:
    """The ranks of every dim of a DTensor's mesh that share it with this rank; none of a plain tensor."""
    if not is_dtensor(p):
        return []
    return [ranks_in(p.device_mesh.get_group(dim)) for dim in range(p.device_mesh.ndim)]


def ranks_in(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def reduced_by_fsdp(module: nn.Module) -> dict[nn.Parameter, Reduced]:
    """Of every parameter that ``fully_shard`` has sharded, how its gradient is reduced.

    FSDP tells nobody by what it divides, so this reads its own records, of which PyTorch has changed the name once.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # a second to import: until somebody has, nothing is sharded by it
    found: dict[nn.Parameter, Reduced] = {}
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


def _reduced(group: Any) -> Reduced:
    kinds = (getattr(group.mesh_info, f"{kind}_process_group", None) for kind in ("shard", "replicate"))
    ranks = [ranks_in(each) for each in kinds if each is not None]
    factor = group.gradient_divide_factor
    return Reduced(ranks, float(prod(map(len, ranks)) if factor is None else factor))
