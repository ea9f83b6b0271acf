"""Bindings of the CUDA driver by ctypes: load a binary, encode a TMA descriptor, start a launch, write and await flags.

Triton's own launcher needs a C compiler, and at each launch it queries the driver about each pointer and encodes each descriptor.
In PyTorch ``attend/launch.py`` starts launches through ``bound_launch.py``, which caches the encoded descriptors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

NO_CONTEXT = 201, 400
"""CUDA_ERROR_INVALID_CONTEXT and CUDA_ERROR_INVALID_HANDLE: this thread has used no GPU yet, or last used another GPU."""

PREFER_SHARED = 1
"""CU_FUNC_CACHE_PREFER_SHARED."""

MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

SHARED_UNASKED = 48 * 2**10
"""Most bytes of shared memory that a program may use unless ``load`` raises the kernel's limit."""

TENSOR_MAP = 128
"""Bytes of an encoded TMA descriptor (CUtensorMap)."""

TENSOR_MAP_ALIGNMENT = 64

L2_PROMOTION_128B = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B."""

CAPTURE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

WAIT_GEQ = 0
"""CU_STREAM_WAIT_VALUE_GEQ."""


class Kernel(NamedTuple):
    """A kernel loaded onto a GPU. ``threads``: threads per program; ``shared``: bytes of shared memory per program."""

    device: int
    function: int
    threads: int
    shared: int


class DescriptorFormat(NamedTuple):
    """A TMA descriptor without its address, last dimension first. ``strides``: in bytes, without the contiguous last dimension.
    ``element`` is a CUtensorMapDataType, ``swizzle`` a CUtensorMapSwizzle."""

    element: int
    swizzle: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class LaunchBuffer:
    """A buffer for the parameters of one start of a kernel, with pointers to them: the driver takes TMA descriptors only by
    pointer. It may be reused as soon as the start returns."""

    def __init__(self, size: int, offsets: Sequence[int]) -> None:
        self.buffer = ctypes.create_string_buffer(size + TENSOR_MAP_ALIGNMENT)
        self.begin = -ctypes.addressof(self.buffer) % TENSOR_MAP_ALIGNMENT
        first = ctypes.addressof(self.buffer) + self.begin
        self._pointers = _array(ctypes.c_void_p, [first + offset for offset in offsets])
        self.pointers = ctypes.addressof(self._pointers)


def load(binary: bytes, name: str, device: int, threads: int, shared: int) -> Kernel:
    """Load the kernel ``name`` of a binary onto a GPU. Raise RuntimeError if the driver refuses."""
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    use(device)
    check(driver.cuModuleLoadData(ctypes.byref(module), binary), "cuModuleLoadData")
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    if shared > SHARED_UNASKED:
        check(driver.cuFuncSetCacheConfig(function, PREFER_SHARED), "cuFuncSetCacheConfig")
        check(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared), "cuFuncSetAttribute")
    assert function.value is not None
    return Kernel(device, function.value, threads, shared)


def start(kernel: Kernel, grid: int, stream: int, parameters: LaunchBuffer) -> None:
    """Start ``grid`` programs on a stream of the kernel's GPU. Raise RuntimeError if the driver refuses."""
    launch, (device, function, threads, shared) = _driver().cuLaunchKernel, kernel
    status = launch(function, grid, 1, 1, threads, 1, 1, shared, stream, parameters.pointers, None)
    if status in NO_CONTEXT:
        use(device)
        status = launch(function, grid, 1, 1, threads, 1, 1, shared, stream, parameters.pointers, None)
    check(status, "cuLaunchKernel")


def encode(address: int, form: DescriptorFormat) -> bytes:
    """Return the encoded TMA descriptor of the array at ``address`` in the format ``form``; TMA reads 0 outside of the array."""
    memory = ctypes.create_string_buffer(TENSOR_MAP + TENSOR_MAP_ALIGNMENT)
    begin = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
    rank = len(form.shape)
    check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.addressof(memory) + begin,
            form.element,
            rank,
            address,
            _array(ctypes.c_uint64, form.shape),
            _array(ctypes.c_uint64, form.strides),
            _array(ctypes.c_uint32, form.block),
            _array(ctypes.c_uint32, (1,) * rank),
            0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
            form.swizzle,
            L2_PROMOTION_128B,
            0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        ),
        "cuTensorMapEncodeTiled",
    )
    return memory.raw[begin : begin + TENSOR_MAP]


def write_value(stream: int, address: int, value: int) -> None:
    """Let the stream write a 32-bit value to device memory, without a kernel, once all earlier work of the stream is done."""
    check(_driver().cuStreamWriteValue32_v2(stream, address, value, 0), "cuStreamWriteValue32")


def wait_value(stream: int, address: int, value: int) -> None:
    """Let the stream wait until ``*address - value`` is at least 0 as a signed 32-bit number, so that counters may overflow."""
    check(_driver().cuStreamWaitValue32_v2(stream, address, value, WAIT_GEQ), "cuStreamWaitValue32")


def exchange_capture_mode(mode: int) -> int:
    """Set this thread's mode of CUDA graph capture and return the earlier one. With ``CAPTURE_RELAXED`` the thread may query
    events and wait on streams that are not captured; by default this invalidates the capture of any thread."""
    exchanged = ctypes.c_int(mode)
    check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(exchanged)), "cuThreadExchangeStreamCaptureMode")
    return exchanged.value


def use(device: int) -> None:
    """Make the GPU's primary context current in this thread; all libraries of the process share this context."""
    driver, context = _driver(), ctypes.c_void_p()
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def check(status: int, name: str) -> None:
    """Raise RuntimeError, with the driver's message, if ``status`` is not CUDA_SUCCESS."""
    if status:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(words))
        raise RuntimeError(f"{name}: {(words.value or b'unknown error').decode()} (CUDA error {status})")


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernel.argtypes = (pointer, *(number,) * 7, pointer, pointer, pointer)
    driver.cuTensorMapEncodeTiled.argtypes = (pointer, number, number, *(pointer,) * 5, *(number,) * 4)
    driver.cuModuleLoadData.argtypes = pointer, ctypes.c_char_p
    driver.cuModuleGetFunction.argtypes = pointer, pointer, ctypes.c_char_p
    driver.cuFuncSetCacheConfig.argtypes = pointer, number
    driver.cuFuncSetAttribute.argtypes = pointer, number, ctypes.c_int
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = pointer, ctypes.c_uint64, number, number
    return driver


def _array(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)
