"""Summation of a module's gradients over the ranks, also after FSDP2 or tensor parallelism has reduced some of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..ring.groups import Group, is_dtensor, local, rank_in, ranks_of, ring_of
from .weights import fsdp_modules, named_parameters

SUMMED = "_ring_attn_summed"
"""The attribute of a gradient that holds its versions, and the ranks over which it was summed."""
means_of_rings: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""Models of transformers whose last backward was of a mean over the labels of one ring, and the ranks of that ring."""


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
    found: dict[nn.Parameter, GradientReduction] = {}
    for each in fsdp_modules(module):
        state = each._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)
        for group in getattr(state, "_fsdp_param_groups", [] if one is None else [one]):
            found |= dict.fromkeys((x.sharded_param for x in group.fsdp_params), _find_reduced(group))
    return found


def _find_reduced(group: Any) -> GradientReduction:
    kinds = (getattr(group.mesh_info, f"{kind}_process_group", None) for kind in ("shard", "replicate"))
    ranks = [ranks_in(each) for each in kinds if each is not None]
    factor = group.gradient_divide_factor
    return GradientReduction(ranks, float(prod(map(len, ranks)) if factor is None else factor))


def sum_gradients(module: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Replace the gradients of ``module``'s trainable parameters by their sum over the ranks of ``group``, in one all-reduce.

    ``group``: all ranks that hold different tokens, as in :func:`loss`; None is the default group. The sum is computed in
    at least float32. A missing gradient counts as zero, because the tokens of a rank may not use every parameter; a gradient that
    all ranks lack stays None, so that an optimizer leaves its parameter alone. The result is the gradient that one device would
    compute from all tokens, also in these three cases:

    - DistributedDataParallel has already averaged each gradient over its ranks. Each rank then holds the mean, and the sum of
      these equal means over the ranks is the sum of the gradients.
    - FSDP2 (``fully_shard``) has already summed each gradient over FSDP's ranks, and divided the sum by the number of these ranks
      or by ``set_gradient_divide_factor``. This function multiplies the result by that divisor. It then sums over ``group``,
      unless FSDP has already summed over all ranks of ``group``.
    - Tensor parallel weights (``parallelize_module``) stay sharded. The ranks that hold the shards of one weight hold the same
      tokens, so ``group`` must be another axis of the mesh.

    Raise ValueError if ``group`` and the mesh of a parameter overlap in any other way, for example if FSDP shards over only a
    part of ``group``. Raise it too if a gradient is sparse. The error names the parameter, and is raised before anything is sent.
    Raise it also if no gradient has changed since an earlier sum over these ranks, or if no rank has a gradient, or if a Hugging
    Face model's loss was the mean over the labels of a ring and ``group`` has other ranks: pass it ``num_items_in_batch``.
    """
    ring = ring_of(group)
    parameters = {name: p for name, p in named_parameters(module).items() if p.requires_grad}
    by_fsdp = reduced_by_fsdp(module)
    done = [_is_summed(name, p, by_fsdp.get(p), ring) for name, p in parameters.items()]
    members = set(dist.get_process_group_ranks(ring)) if ranks_of(ring) > 1 else set()
    for each in module.modules():
        if members - means_of_rings.get(each, members):
            raise ValueError(
                f"gradients are summed over ranks {sorted(members)}, and the loss of {type(each).__name__} was the mean over the "
                f"labels of a ring of ranks {sorted(means_of_rings.pop(each))}: the sum of several rings' means is not the mean "
                "over all labels. Pass num_items_in_batch=, the number of labels of all rings, to the model, as "
                "docs/transformers.md shows"
            )
    earlier = {p: _find_summed(p.grad) for p in parameters.values() if p.grad is not None}
    is_stale = bool(earlier) and all(len(members & ranks) > 1 for ranks in earlier.values())
    mine = [p for p, summed in zip(parameters.values(), done, strict=True) if not summed]
    if is_stale and not mine:
        raise ValueError(_stale("", members))
    if mine:
        placed = [torch.zeros_like(p) if p.grad is None else _place(p.grad, p) for p in mine]
        lacking = _all_reduce([local(x) for x in placed], [p.grad is None for p in mine], ring, is_stale)
        for p, gradient, by_all in zip(mine, placed, lacking, strict=True):
            p.grad = None if by_all else gradient
        if len(mine) == len(parameters) and all(lacking):
            raise ValueError("no parameter has a gradient on any rank: call sum_gradients after backward, before the step")
    for p in parameters.values():
        if p.grad is not None:
            p.grad = _place(p.grad, p)
            if p in by_fsdp:
                p.grad.mul_(by_fsdp[p].divisor)
            setattr(p.grad, SUMMED, (_versions(p.grad), members | earlier.get(p, set())))


def _find_summed(gradient: Tensor) -> set[int]:
    """Return the ranks over which ``sum_gradients`` has summed ``gradient``, if nothing has changed it since."""
    versions, ranks = getattr(gradient, SUMMED, (None, set()))
    return ranks if versions == _versions(gradient) else set()


def _versions(gradient: Tensor) -> tuple[int, int]:
    return gradient._version, local(gradient)._version  # FSDP2 adds to the local tensor alone


def _place(gradient: Tensor, p: nn.Parameter) -> Tensor:
    """Return the gradient in its parameter's placements: that of a norm of heads, held whole, is in partial sums."""
    if is_dtensor(p) and is_dtensor(gradient) and gradient.placements != p.placements:
        return gradient.redistribute(placements=p.placements)
    return gradient


def _stale(whose: str, members: Iterable[int]) -> str:
    return (
        f"the gradients{whose} are summed over ranks {sorted(members)} already, and no backward has changed them since: call "
        "sum_gradients once, after the last backward of a step"
    )


def _all_reduce(gradients: list[Tensor], missing: list[bool], ring: Group, is_stale: bool) -> list[bool]:
    """Replace each tensor by its sum over the ranks. Return for each whether it is ``missing`` on all ranks. One all-reduce also
    counts the ranks that miss each gradient, and marks stale ranks. On a GPU, where reading waits for the device, only a rank
    raises that misses a gradient or is stale, and the sums of the others become NaN."""
    dtype = reduce(torch.promote_types, (x.dtype for x in gradients), torch.float32)
    seen = [float(x) for x in missing] + [float(is_stale and rank == rank_in(ring)) for rank in range(ranks_of(ring))]
    counts = torch.zeros(len(seen), dtype=dtype, device=gradients[0].device)
    if any(seen):
        counts += torch.tensor(seen, device=counts.device)
    flat = torch.cat([*(x.flatten().to(dtype) for x in gradients), counts])
    if is_stale:
        flat[: -len(seen)] = torch.nan
    dist.all_reduce(flat, group=ring)
    *totals, counts, marks = flat.split([*(x.numel() for x in gradients), len(missing), ranks_of(ring)])
    members = dist.get_process_group_ranks(ring)
    if (any(seen) or marks.is_cpu) and (stale := [rank for rank, mark in zip(members, marks.tolist(), strict=True) if mark]):
        raise ValueError(_stale("" if stale == members else f" of ranks {stale}", members))
    for x, total in zip(gradients, totals, strict=True):
        x.copy_(total.view_as(x))
    return (counts == ranks_of(ring)).tolist() if any(missing) else missing


def _is_summed(name: str, p: nn.Parameter, by_fsdp: GradientReduction | None, ring: Group) -> bool:
    """Return True if the gradient of ``p`` needs no sum over the ring: FSDP has summed it, or the ring has one rank."""
    if p.grad is not None and p.grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name} is sparse: make the module with sparse=False")
    if ranks_of(ring) == 1:
        return True
    members, covered = set(dist.get_process_group_ranks(ring)), 1
    for ranks in dim_ranks(p):
        common = len(members.intersection(ranks))
        own = by_fsdp is not None and ranks in by_fsdp.ranks
        if common > 1 and not (own and common == len(ranks)):
            raise ValueError(_refusal(name, ranks, members, own))
        covered *= max(common, 1)
    if 1 < covered < len(members):
        assert by_fsdp is not None
        raise ValueError(_refusal(name, by_fsdp.ranks[0], members, True))
    return covered > 1


def _refusal(name: str, ranks: tuple[int, ...], members: set[int], by_fsdp: bool) -> str:
    why = "FSDP has summed it already over" if by_fsdp else "it is shared, with the same tokens, by"
    what = "ranks that FSDP has not summed over, or let it sum over all" if by_fsdp else "other axes of the mesh, also to loss"
    return (
        f"the gradient of {name} cannot be summed over ranks {sorted(members)}, for {why} ranks {list(ranks)}: pass as group, "
        f'such as mesh["seq"], the {what}'
    )
