"""Weights as numpy arrays, under the same names and in the same orientation in both packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ring_attn_core.model.weight_names import check_state

from ..ring.groups import is_dtensor

Module = TypeVar("Module", bound=nn.Module)

WRAPPED = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"
"""What torch.compile, checkpoint_wrapper and FSDP1 call the module that they wrap."""


def to_numpy(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters of a module as copies in numpy, by dotted name, such as ``blocks.0.attention.q.weight`` [out, in].

    bfloat16 and float16 come as float32. ``from_numpy`` of either package reads them. What torch.compile,
    DistributedDataParallel and checkpoint_wrapper put before the names is left out. DTensors (FSDP2, tensor parallelism) come
    whole, and are gathered one after the other: every rank of their mesh must call it.
    """
    state = {}
    for name, p in named_parameters(module).items():
        with torch.no_grad():
            whole = p.full_tensor() if is_dtensor(p) else p.detach()
        state[name] = whole.to("cpu", torch.promote_types(p.dtype, torch.float32), copy=True).numpy()
    return state


def from_numpy(module: Module, state: Mapping[str, np.ndarray]) -> Module:
    """Set the parameters of ``module``, each in its own dtype, to what ``to_numpy`` of either package gave; returns ``module``.

    Of a DTensor a rank takes its shard out of the ``state`` that it was given, and nothing is sent. Raises ValueError that lists
    what is missing, unexpected or of another shape, and then changes nothing.
    """
    parameters = named_parameters(module)
    check_state({name: p.shape for name, p in parameters.items()}, {name: np.shape(x) for name, x in state.items()})
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(_placed(torch.tensor(np.asarray(state[name])), p))
    return module


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module by the names that they have without a wrapper."""
    return {_inside(module, name): p for name, p in module.named_parameters()}


def _inside(module: nn.Module, name: str) -> str:
    kept, holder = [], module
    for part in name.split("."):
        wraps = part == "module" and isinstance(holder, DistributedDataParallel | DataParallel)
        if not (wraps or part in WRAPPED):
            kept.append(part)
        holder = getattr(holder, part)
    return ".".join(kept)


def _placed(whole: Tensor, p: nn.Parameter) -> Tensor:
    """``whole``, which every rank has, as a DTensor that is sharded like ``p`` if that is one."""
    if not is_dtensor(p):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    replicated = [Replicate()] * p.device_mesh.ndim
    there = whole.to(p.to_local().device, p.dtype)
    return DTensor.from_local(there, p.device_mesh, replicated, run_check=False).redistribute(placements=p.placements)
