"""The ranks' gradients of a module's weights, added up."""

from __future__ import annotations

from functools import reduce

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..layers.attention import ring_of
from ..ring.groups import ranks_of


def sum_gradients(module: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Replace the gradients of ``module``'s parameters by their sum over the ranks of ``group``, in one all-reduce.

    ``group``: all ranks that hold different tokens, as in :func:`loss`; None is the default group. Summed in float32. A parameter
    without a gradient counts as zero, so that ranks whose tokens do not reach it take part.
    """
    ring = ring_of(group)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if ranks_of(ring) == 1 or not parameters:
        return
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(dtype) for p in parameters])
    dist.all_reduce(flat, group=ring)
    for p, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = total.view_as(p).to(p.dtype)
