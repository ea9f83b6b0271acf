"""The ranks of a ring: process groups and device meshes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# torch.distributed.nn is imported here, before a group exists, because torch.utils.checkpoint imports it at its first call. The
# import makes the current group.WORLD a default argument, which keeps gloo's threads alive after destroy_process_group. If one of
# them frees a tensor while Python exits, the process aborts ("terminate called without an active exception"). Without a group
# the default is None. The import takes 2 ms.

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Mark ``function`` as ``torch.compiler.assume_constant_result`` does, but without importing dynamo, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def group_name(group: Any) -> str:
    """Return the name of the ring's process group, or "" for a ring of one rank without torch.distributed."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise NotImplementedError(
                f"group is a {group.ndim}-D DeviceMesh {group.mesh_dim_names}: a ring over several axes does not work yet, "
                'pass one axis of it, mesh["name"]'
            )
        group = group.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ""
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group: call ring_attention only on the ranks that form the ring")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a ProcessGroup, a 1-D DeviceMesh or None (the default group), got {type(group).__name__}"
        )
    return group.group_name


@constant
def group_of(name: str) -> Group:
    return _resolve_process_group(name) if name else None  # type: ignore[arg-type]


Group = dist.ProcessGroup | None
"""A ring: a process group, or None for a ring of one rank without torch.distributed."""


@constant
def ring_of(group: dist.ProcessGroup | DeviceMesh | None) -> Group:
    """Convert a user's ``group`` argument to a process group, or to None for a ring of one rank without torch.distributed."""
    return group_of(group_name(group))


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    """Return True if ``x`` is a DTensor. Its module takes a second to import; if nothing has imported it, no DTensor exists."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    return x.to_local() if is_dtensor(x) else x


def rank_in(group: Group) -> int:
    return 0 if group is None else group.rank()


def ranks_of(group: Group) -> int:
    return 1 if group is None else group.size()


def store_of(group: dist.ProcessGroup) -> Any:
    return dist.distributed_c10d._get_process_group_store(group)


def capturing(device: str) -> bool:
    return device == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
