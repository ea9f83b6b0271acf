"""Names of Gluon, Triton's language of explicit layouts, that differ between the releases 3.6, 3.7 and 3.9, and its host side."""

from __future__ import annotations

from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["constexpr_function", "copy_tile", "host_descriptor", "jit", "shared_layout", "source"]

jit = gluon.jit
constexpr_function = gluon.constexpr_function
source = GluonASTSource

copy_tile: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in 3.8
"""copy_tile(descriptor, coordinates, barrier, tile): from global to shared memory, by TMA."""


@cache
def shared_layout(block: tuple[int, ...], dtype: str) -> Any:
    """How a tile lies in shared memory, of elements such as "bf16": swizzled as TMA writes it and as wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for(list(block), {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}[dtype])


def host_descriptor(array: Any, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], dtype: str) -> Any:
    """What a launch from Python takes for a TMA descriptor."""
    return TensorDescriptor(array, list(shape), list(strides), list(block), shared_layout(block, dtype))
