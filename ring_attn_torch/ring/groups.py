"""The ranks of a ring: process groups and device meshes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# torch.distributed.nn is imported here so that nobody imports it later, as torch.utils.checkpoint does at its first call: what it
# finds as group.WORLD becomes a default argument, which keeps gloo's threads alive after destroy_process_group. One of them that
# lets go of a tensor while Python exits aborts the process ("terminate called without an active exception"). Before there is a
# group it finds None. It takes 2 ms.

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """``torch.compiler.assume_constant_result``, which would import all of torch.compile, a second's worth, to say so."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def group_name(group: Any) -> str:
    """The name under which torch.distributed knows the ring; "" for a ring of one in a process without torch.distributed."""
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
    """The process group of that name."""
    return _resolve_process_group(name) if name else None  # type: ignore[arg-type]


Group = dist.ProcessGroup | None
"""A ring: a process group, or None for a ring of one where torch.distributed is not in use."""


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    """Whether ``x`` is a DTensor, whose module takes a second to import: until somebody has, nobody has made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return x.to_local() if is_dtensor(x) else x


def rank_in(group: Group) -> int:
    return 0 if group is None else group.rank()


def ranks_of(group: Group) -> int:
    return 1 if group is None else group.size()
