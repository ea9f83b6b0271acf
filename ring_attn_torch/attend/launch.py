"""A Launch on PyTorch's current stream: outputs are allocated or overwritten, the compiled kernel is started."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ring_attn_core.kernels.compile import compiled, interpreted, kernel_function
from ring_attn_core.kernels.launch import Descriptor, Launch, Scalar, host_descriptor


def launch(launch: Launch, arrays: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a launch. ``arrays`` by name, contiguous; those that an output overwrites must be nobody else's."""
    device = arrays[launch.inputs[0]].device
    outputs = tuple(
        arrays[x.over] if x.over else torch.empty(x.shape, dtype=getattr(torch, x.dtype), device=device) for x in launch.outputs
    )
    if launch.grid == 0:
        return outputs
    named = {**arrays, **{x.name: made for x, made in zip(launch.outputs, outputs, strict=True)}}
    for name, x in launch.zeros.items():
        named[x.name] = named[name] = torch.zeros(x.shape, dtype=getattr(torch, x.dtype), device=device)
    arguments = {parameter: _argument(x, named) for parameter, x in launch.arguments}
    function = kernel_function(launch.kernel)
    if interpreted():
        everything = dict.fromkeys(function.arg_names) | dict(launch.constants) | arguments
        function[(launch.grid,)](**everything)
    else:
        with torch.cuda.device(device):
            kernel = compiled(launch, capability(device))
            kernel[(launch.grid, 1, 1)](*(arguments.get(parameter) for parameter in function.arg_names))
    return outputs


def _argument(x: Any, named: Mapping[str, Tensor]) -> Any:
    if isinstance(x, Scalar):
        return x.value
    array = named[x.name]
    if isinstance(x, Descriptor):
        return host_descriptor(array, x)
    return array


def aligned(x: Tensor) -> Tensor:
    """``x`` as kernels take it: contiguous, from an address that 16 divides on."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@lru_cache
def capability(device: torch.device) -> int:
    """The compute capability of an NVIDIA GPU, such as 90; 0 elsewhere."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
