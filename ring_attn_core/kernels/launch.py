"""A kernel launch as data, the same for both frameworks: which kernel, how many programs, which arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..records import hashed_once

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
    """A host TMA descriptor of blocks ``block`` of a contiguous array of that shape; what lies outside of it is read as 0.

    ``pitch``: elements from one row of the last dimension to the next, where the array has more columns than ``shape`` says.
    ``gluon``: for a Gluon kernel, whose type of it says how blocks lie in shared memory, ``swizzled`` or row after row.
    """

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
        """Return how blocks lie in shared memory, for a Gluon kernel."""
        from .hopper.gluon import shared_layout

        return shared_layout(self.block, TRITON_TYPES[self.dtype], self.swizzled)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the strides in elements."""
        strides = [1]
        for size in reversed((*self.shape[1:-1], self.pitch or self.shape[-1])):
            strides.append(strides[-1] * size)
        return tuple(reversed(strides))


@dataclass(frozen=True)
class Scalar:
    """A number that the compiled kernel does not depend on, but, where it is ``divided``, for whether 16 divides it."""

    value: int | float
    type: str
    divided: bool = True


Argument = Array | Descriptor | Scalar


@dataclass(frozen=True)
class Output:
    """What a launch returns: an array of its own, or the given array ``over``, overwritten in place."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    over: str | None = None


@hashed_once
@dataclass(frozen=True)
class Launch:
    """``arguments`` and ``constants`` by the kernel's parameters; one that is in neither is None in the kernel.

    Arrays that are outputs come last among the kernel's arrays, in the order of ``outputs``; behind them ``scratch``, which is
    overwritten like an output, over an input of zeros that whoever launches it makes, and which nobody sees afterwards.
    """

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
        """Return outputs and scratch, in the order of the kernel's parameters."""
        return self.outputs + self.scratch

    @cached_property
    def zeros(self) -> dict[str, Output]:
        """Return what the inputs of zeros become, by their names."""
        return {x.over: x for x in self.scratch if x.over}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the arrays that go in, in the order of the kernel's parameters; one may come twice."""
        made = {output.name for output in self.written}
        return tuple(x.name for _, x in self.arguments if not isinstance(x, Scalar) and x.name not in made)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """Return the names of the outputs."""
        return tuple(output.name for output in self.outputs)

    @cached_property
    def signature(self) -> tuple[tuple[str, str], ...]:
        """Return the type of every argument by its parameter."""
        return tuple((parameter, argument.type) for parameter, argument in self.arguments)

    @cached_property
    def divisible(self) -> frozenset[str]:
        """Return the parameters that 16 divides: arrays by contract, integers by their value."""
        return frozenset(
            parameter
            for parameter, x in self.arguments
            if isinstance(x, Array) or (isinstance(x, Scalar) and x.type == "i32" and x.divided and x.value % 16 == 0)
        )


def host_descriptor(array: Any, x: Descriptor) -> Any:
    """Return what Triton's interpreter takes for a Descriptor of ``array``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(array, list(x.shape), list(x.strides), list(x.block))


def encodings(kernel: Any) -> list[dict[str, Any]]:
    """Return how the driver is to encode each TMA descriptor of a compiled kernel: elem_type, swizzle and block_shape."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return [
        {
            "elem_type": TMA_DTYPE_DEVICE_TO_HOST[made["elem_type"]],
            "swizzle": made["swizzle"],
            "block_shape": list(made["block_size"]),
        }
        for made in kernel.metadata.tensordesc_meta or ()
    ]
