"""Rules for caching the arrays that a call puts on the GPU before its kernels: cache keys, and limits of CUDA graph capture.

The caches are in ``kernels.py`` and ``one_run.py``. One result computed from extents serves all layers of a model and both passes
of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ring_attn_core.kernels.driver import CAPTURE_RELAXED, exchange_capture_mode


class Unchanged:
    """A cache key of a tensor or None, equal to another of the same tensor object if the tensor was not modified in between."""

    __slots__ = "tensor", "version"

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor, self.version = tensor, None if tensor is None else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unchanged) and self.tensor is other.tensor and self.version == other.version

    def __hash__(self) -> int:
        return id(self.tensor)


def reusable(tensors: Iterable[Tensor | None], device: torch.device) -> bool:
    """Return True if results of ``tensors`` may be cached. During CUDA graph capture they may not: a replay must compute anew.
    PyTorch does not count changes of inference tensors."""
    if device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
        return False
    return not any(x is not None and x.is_inference() for x in tensors)


def stream_of(device: torch.device) -> int:
    """Return the current CUDA stream of a device, 0 on CPUs. Cache keys include it: a stream may read only its own results."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


@contextmanager
def beside_capture(device: torch.device) -> Iterator[None]:
    """Use another stream inside the ``with`` if the current one captures a CUDA graph, so that the host can copy to the GPU."""
    if device.type != "cuda" or not torch._C._cuda_isCurrentStreamCapturing():
        yield
        return
    mode = exchange_capture_mode(CAPTURE_RELAXED)
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            yield
    finally:
        exchange_capture_mode(mode)
