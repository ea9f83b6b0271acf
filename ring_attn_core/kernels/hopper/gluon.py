"""Gluon, Triton's language of explicit layouts: functions that differ between Triton's releases, and shared-memory layouts."""

from __future__ import annotations

from functools import cache
from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["add_tile", "constexpr_function", "copy_tile", "jit", "shared_layout", "source"]

jit = gluon.jit
constexpr_function = gluon.constexpr_function
source = GluonASTSource

copy_tile: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in 3.8
"""copy_tile(descriptor, coordinates, barrier, tile) copies a tile from global to shared memory by TMA."""


@_core.builtin
def _add_tile(descriptor: Any, coordinates: Any, tile: Any, _semantic: Any = None) -> None:
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle)


@_core.builtin
def wait_for_products(in_flight: Any, deps: Any, _semantic: Any = None) -> Any:
    """Wait like ``warpgroup_mma_wait``, but let each warpgroup of a partition wait for its own products only. Triton 3.9 puts a
    barrier of all warps behind each wait that is not marked as local to a warpgroup."""
    results: Any = hopper.warpgroup_mma_wait(in_flight, deps, _semantic=_semantic)
    first = results if len(deps) == 1 else results[0]
    if hasattr(_semantic.builder, "get_unit_attr"):
        first.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return results


add_tile: Any = getattr(tma, "async_atomic_add", None) or _add_tile  # not exposed before 3.8
"""add_tile(descriptor, coordinates, tile) adds a tile in shared memory to one in global memory by TMA."""


meet: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier")  # noqa: B009 renamed in 3.7
"""meet() is a barrier of all warps of a partition."""


@cache
def shared_layout(block: tuple[int, ...], dtype: str, swizzled: bool = True) -> Any:
    """Return the shared-memory layout of a tile of "bf16", "fp16" or "fp32": swizzled, as wgmma needs it, or row-major."""
    if not swizzled:
        return gl.NVMMASharedLayout(0, {"bf16": 16, "fp16": 16, "fp32": 32}[dtype], len(block))
    layout_for: Any = gl.NVMMASharedLayout.get_default_for  # typed as Any, because Triton 3.9's types forbid the call
    return layout_for(list(block), {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}[dtype])
