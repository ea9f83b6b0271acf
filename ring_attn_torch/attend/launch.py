"""Kernel launches on PyTorch's current stream. Each output is a new tensor or overwrites an input.

Kernels start without Triton's launcher: the core's ``kernels/bound_launch.py`` packs the arguments and caches the TMA
descriptors, and its ``kernels/driver.py`` calls CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ring_attn_core.kernels.bound_launch import BoundLaunch
from ring_attn_core.kernels.compile import is_interpreted, kernel_function
from ring_attn_core.kernels.launch import Descriptor, Launch, Output, Scalar, host_descriptor


def launch(launch: Launch, arrays: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Start a kernel launch on contiguous tensors by name. A tensor that an output overwrites must not be in use elsewhere."""
    return _ready(launch, arrays[launch.inputs[0]].device)(arrays)


class _ReadyLaunch:
    """A launch prepared for one device: templates of its outputs and, on a GPU, the compiled and loaded kernel."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self._launch, self._device = launch, device
        self._made = [(x.name, _like(x, device)) for x in launch.outputs if not x.over]
        self._overwritten = [(x.name, x.over) for x in launch.outputs if x.over]
        self._zeros = [(name, x) for name, x in launch.zeros.items()]
        self._bound = BoundLaunch(launch, capability(device), device.index) if launch.grid and not is_interpreted() else None

    def __call__(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        named, device, bound = {**arrays}, self._device, self._bound
        for name, like in self._made:
            named[name] = torch.empty_like(like, memory_format=torch.contiguous_format)
        for name, over in self._overwritten:
            named[name] = arrays[over]
        if self._launch.grid:
            for name, x in self._zeros:
                named[x.name] = named[name] = _zeros(x, device)
            if bound is None:
                _interpret(self._launch, named)
            elif device.index == torch._C._cuda_getDevice():
                bound.start(named, torch._C._cuda_getCurrentRawStream(device.index))
            else:
                with torch.cuda.device(device):
                    bound.start(named, torch._C._cuda_getCurrentRawStream(device.index))
        return tuple([named[name] for name in self._launch.output_names])


@lru_cache(maxsize=4096)
def _ready(launch: Launch, device: torch.device) -> _ReadyLaunch:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _ReadyLaunch(launch, device)


def _like(x: Output, device: torch.device) -> Tensor:
    """Return an output's template for ``empty_like``, which is faster than ``empty(shape)``: one element, expanded."""
    return torch.empty((), dtype=getattr(torch, x.dtype), device=device).expand(x.shape)


ZEROS, ZERO = 256, 16
"""The number of zeroed scratch buffers that are allocated together, and the bytes of each."""

_zeros_left: dict[tuple[torch.device, int], list[Tensor]] = {}
"""The unused zeroed buffers by (device, stream). A buffer is zeroed and used on the same stream, so the zeroing comes first."""


def _zeros(x: Output, device: torch.device) -> Tensor:
    """Return zeroed scratch memory for ``x``, if small from the pool of the current CUDA stream. CUDA graph capture takes none
    from the pool, because it would no longer be 0 when the graph is replayed."""
    small = math.prod(x.shape) * getattr(torch, x.dtype).itemsize <= ZERO
    if not small or device.type != "cuda" or torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(x.shape, dtype=getattr(torch, x.dtype), device=device)
    left = _zeros_left.setdefault((device, torch._C._cuda_getCurrentRawStream(device.index)), [])
    try:
        return left.pop()
    except IndexError:
        left.extend(torch.zeros(ZEROS, ZERO, dtype=torch.uint8, device=device).unbind())
        return left.pop()


def _interpret(launch: Launch, named: Mapping[str, Tensor]) -> None:
    function = kernel_function(launch.kernel)
    arguments = {parameter: _run_interpreted(x, named) for parameter, x in launch.arguments}
    function[(launch.grid,)](**dict.fromkeys(function.arg_names) | dict(launch.constants) | arguments)


def _run_interpreted(x: Any, named: Mapping[str, Tensor]) -> Any:
    if isinstance(x, Scalar):
        return x.value
    if isinstance(x, Descriptor):
        return host_descriptor(named[x.name], x)
    return named[x.name]


def align(x: Tensor) -> Tensor:
    """Return ``x`` contiguous and aligned to 16 bytes, as kernels need it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@lru_cache
def capability(device: torch.device) -> int:
    """Return the compute capability of an NVIDIA GPU, such as 90; 0 for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
