"""Kernel launches as plain data, the same in both frameworks: kernel, grid, arguments, constants and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..records import hash_once

TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "uint32": "u32",
    "uint8": "u8",
}


@dataclass(frozen=True)
class Array:
    """A pointer to the first element of a contiguous array, aligned to 16 bytes."""

    name: str
    dtype: str

    @property
    def type(self) -> str:
        return "*" + TRITON_TYPES[self.dtype]


@dataclass(frozen=True)
class Descriptor:
    """A host TMA descriptor of an array in blocks of shape ``block``; TMA reads 0 outside of the array. ``pitch``: elements from
    row to row, 0 for ``shape[-1]``. ``gluon``: its type includes the shared-memory layout, ``swizzled`` or row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    pitch: int = 0
    gluon: bool = False
    swizzled: bool = True

    @property
    def type(self) -> str:
        element = TRITON_TYPES[self.dtype]
        layout = f",{self.layout!r}" if self.gluon else ""
        return f"tensordesc<{element}[{', '.join(map(str, self.block))}]{layout}>"

    @property
    def layout(self) -> Any:
        """Return the shared-memory layout of a block, for a Gluon kernel."""
        from .hopper.gluon import shared_layout

        return shared_layout(self.block, TRITON_TYPES[self.dtype], self.swizzled)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the array's strides in elements."""
        strides = [1]
        for size in reversed((*self.shape[1:-1], self.pitch or self.shape[-1])):
            strides.append(strides[-1] * size)
        return tuple(reversed(strides))


@dataclass(frozen=True)
class Scalar:
    """A number passed at launch, of which one compiled kernel serves all values."""

    value: int | float
    type: str


Argument = Array | Descriptor | Scalar


class Specialization(NamedTuple):
    """Everything that changes a kernel's binary; 16 divides every address in ``signature``, (parameter, type) each."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    capability: int


@dataclass(frozen=True)
class Output:
    """An output array of a launch: a new array, or the input named ``over``, overwritten in place."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    over: str | None = None


@hash_once
@dataclass(frozen=True)
class Launch:
    """A launch of ``grid`` programs; a kernel parameter that is in neither ``arguments`` nor ``constants`` is None. The kernel's
    last array parameters are the ``outputs``, then ``scratch``: filled with zeros, passed as input and output, and dropped after
    the launch."""

    kernel: str
    grid: int
    arguments: tuple[tuple[str, Argument], ...]
    constants: tuple[tuple[str, Any], ...]
    outputs: tuple[Output, ...]
    warps: int
    stages: int
    scratch: tuple[Output, ...] = ()

    @property
    def written(self) -> tuple[Output, ...]:
        """Return the outputs and scratch arrays, in the order of the kernel's parameters."""
        return self.outputs + self.scratch

    @cached_property
    def zeros(self) -> dict[str, Output]:
        """Return a dict from the name of each zero-filled input to the scratch array that overwrites this input."""
        return {x.over: x for x in self.scratch if x.over}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the input arrays, in the order of the kernel's parameters; a name may occur twice."""
        made = {output.name for output in self.written}
        return tuple(x.name for _, x in self.arguments if not isinstance(x, Scalar) and x.name not in made)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """Return the names of the outputs, in order."""
        return tuple(output.name for output in self.outputs)

    def specialization(self, capability: int) -> Specialization:
        """Return what the kernel is compiled for, on a GPU of compute capability ``capability``."""
        signature = tuple((parameter, argument.type) for parameter, argument in self.arguments)
        return Specialization(self.kernel, signature, self.constants, self.warps, self.stages, capability)


def host_descriptor(array: Any, x: Descriptor) -> Any:
    """Return the TensorDescriptor of ``array`` that Triton's interpreter takes in place of ``x``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(array, list(x.shape), list(x.strides), list(x.block))


def encodings(kernel: Any) -> list[dict[str, Any]]:
    """Return the driver's encoding of each TMA descriptor of a compiled kernel: elem_type, swizzle and block_shape."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return [
        {
            "elem_type": TMA_DTYPE_DEVICE_TO_HOST[made["elem_type"]],
            "swizzle": made["swizzle"],
            "block_shape": list(made["block_size"]),
        }
        for made in kernel.metadata.tensordesc_meta or ()
    ]
