"""Weights as numpy arrays, with the same names and orientation in ring_attn_jax and ring_attn_torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ring_attn_core.model.replica_check import name_entries
from ring_attn_core.model.weight_names import check_state

from ..ring.groups import is_dtensor

Module = TypeVar("Module", bound=nn.Module)

WRAPPED = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"
"""Attributes in which torch.compile, checkpoint_wrapper and FSDP1 hold the module that they wrap."""


def to_numpy(module: nn.Module) -> dict[str, np.ndarray]:
    """Return numpy copies of a module's parameters by dotted name, such as ``blocks.0.attention.q.weight`` [out, in].

    bfloat16 and float16 become float32. ``from_numpy`` of the JAX or the PyTorch package reads the result. The prefixes of
    torch.compile, DistributedDataParallel and checkpoint_wrapper are removed from the names. DTensors (FSDP2, tensor parallelism)
    are gathered one by one, so every rank of their mesh must call it.
    """
    state = {}
    for name, p in named_parameters(module).items():
        with torch.no_grad():
            whole = p.full_tensor() if is_dtensor(p) else p.detach()
        state[name] = whole.to("cpu", torch.promote_types(p.dtype, torch.float32), copy=True).numpy()
    return state


def from_numpy(module: Module, state: Mapping[str, np.ndarray]) -> Module:
    """Set the parameters of ``module``, each in its own dtype, to the arrays ``state``. Return ``module``.

    ``state``: arrays from ``to_numpy`` of the JAX or the PyTorch package. For a DTensor, a rank takes its shard from its own
    ``state``, and nothing is sent. Raise ValueError if weights are missing, unexpected or of another shape. The error lists them,
    and nothing changes.
    """
    reshard(module)
    parameters = named_parameters(module)
    check_state({name: p.shape for name, p in parameters.items()}, {name: np.shape(x) for name, x in state.items()})
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(_place(torch.tensor(np.asarray(state[name])), p))
    return module


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return name_entries((inside(module, name), p) for name, p in module.named_parameters())


def fsdp_modules(module: nn.Module) -> Iterator[Any]:
    """Yield the modules that ``fully_shard`` has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes a second to import; if not imported yet, it has sharded nothing
    return (each for each in module.modules() if isinstance(each, getattr(fsdp, "FSDPModule", ())))


def reshard(module: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered. After a forward without a backward its root holds them, in place of shards."""
    for each in fsdp_modules(module):
        each.reshard()


def inside(module: nn.Module, name: str) -> str:
    parents, parent = [], module
    for part in name.split("."):
        wraps = part == "module" and isinstance(parent, DistributedDataParallel | DataParallel)
        if not (wraps or part in WRAPPED):
            parents.append(part)
        parent = getattr(parent, part)
    return ".".join(parents)


def _place(whole: Tensor, p: nn.Parameter) -> Tensor:
    """Return the global tensor ``whole``, sharded like ``p`` if it is a DTensor. Every rank holds ``whole``: nothing is sent."""
    if not is_dtensor(p):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    replicated = [Replicate()] * p.device_mesh.ndim
    there = whole.to(p.to_local().device, p.dtype)
    return DTensor.from_local(there, p.device_mesh, replicated, run_check=False).redistribute(placements=p.placements)
