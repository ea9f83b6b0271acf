"""Launches bound to a compiled kernel on one GPU. To start a bound launch, only the addresses of its arrays are filled in.

The offsets of a kernel's parameters come from its PTX. TMA descriptors are cached by the address of their array.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from .compile import compile_launch, kernel_function
from .driver import TENSOR_MAP, DescriptorFormat, LaunchBuffer, encode, load, start
from .launch import Descriptor, Launch, Scalar, encodings

MAX_ADDRESSES = 1024
"""Largest number of TMA descriptors in a ``DescriptorCache``. A full cache is emptied before it stores another descriptor."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

PTX_TYPES = {"u64": ("Q", 8), "u32": ("I", 4), "f32": ("f", 4), "b64": ("Q", 8), "b32": ("I", 4)}
"""The ``struct`` code and the size in bytes of each parameter type. The alignment equals the size."""

_PARAMETER = re.compile(r"^\s*\.param (?:\.align (\d+) )?\.(\w+)[^,\[\n]*(?:\[(\d+)\])?", re.MULTILINE)


class Parameters(NamedTuple):
    """The parameter values of a kernel in order, with placeholders for addresses and TMA descriptors. ``arrays`` and
    ``descriptors`` hold (index in ``values``, array name) of each placeholder."""

    values: list[Any]
    arrays: list[tuple[int, str]]
    descriptors: list[tuple[int, str, DescriptorCache]]


class DescriptorCache(dict[int, bytes]):
    """The TMA descriptors of one array argument of a launch, by address; a lookup of a new address encodes a descriptor."""

    def __init__(self, descriptor: DescriptorFormat) -> None:
        super().__init__()
        self._of = descriptor

    def __missing__(self, address: int) -> bytes:
        if len(self) >= MAX_ADDRESSES:
            self.clear()
        self[address] = made = encode(address, self._of)
        return made


class BoundLaunch:
    """A launch compiled and loaded for one GPU, ``device``; several threads may start it at the same time."""

    def __init__(self, launch: Launch, capability: int, device: int) -> None:
        kernel = compile_launch(launch, capability)
        made = kernel.metadata
        self._parameters = parameters(launch, kernel)
        self._layout, offsets = layout(kernel.asm["ptx"], [isinstance(value, bytes) for value in self._parameters.values])
        self._memory = lambda: LaunchBuffer(self._layout.size, offsets)
        self._free: list[LaunchBuffer] = []
        self._kernel = load(kernel.asm["cubin"], made.name, device, 32 * made.num_warps, made.shared)
        self._grid = launch.grid

    def start(self, named: Mapping[str, Any], stream: int) -> None:
        """Start the launch on a stream; ``named`` maps array names to arrays with a ``data_ptr()``."""
        values, arrays, descriptors = self._parameters
        values = values.copy()
        for place, name in arrays:
            values[place] = named[name].data_ptr()
        for place, name, encoded in descriptors:
            values[place] = encoded[named[name].data_ptr()]
        memory = self._free.pop() if self._free else self._memory()  # one for each concurrent start
        self._layout.pack_into(memory.buffer, memory.begin, *values)
        start(self._kernel, self._grid, stream, memory)
        self._free.append(memory)


def parameters(launch: Launch, kernel: Any) -> Parameters:
    """Return the parameters of a launch's compiled kernel. Leave out Triton's scratch memory: these kernels do not use it."""
    arguments, formats = dict(launch.arguments), iter(encodings(kernel))
    found = Parameters([], [], [])
    for x in (arguments[name] for name in kernel_function(launch.kernel).arg_names if name in arguments):
        if isinstance(x, Scalar):
            found.values.append(x.value)
        elif isinstance(x, Descriptor):
            found.descriptors.append((len(found.values), x.name, DescriptorCache(descriptor_format(x, next(formats)))))
            found.values.extend([b"", *x.shape, *x.strides])
        else:
            found.arrays.append((len(found.values), x.name))
            found.values.append(0)
    return found


def descriptor_format(x: Descriptor, encoding: Mapping[str, Any]) -> DescriptorFormat:
    """Return a TMA descriptor in the driver's format, with the element type, swizzle and block shape of ``encoding``."""
    strides = (stride * ITEM_BYTES[x.dtype] for stride in reversed(x.strides[:-1]))
    block = tuple(reversed(encoding["block_shape"]))
    return DescriptorFormat(encoding["elem_type"], encoding["swizzle"], tuple(reversed(x.shape)), tuple(strides), block)


def layout(ptx: str, tensor_maps: list[bool]) -> tuple[struct.Struct, list[int]]:
    """Return the ``struct`` packing of a kernel's parameters by the ".param" declarations of its PTX, and their offsets in bytes.
    ``tensor_maps``: True for each TMA descriptor. At most two pointers to Triton's scratch memory follow, packed as 0."""
    entry = ptx[ptx.index(".entry") :]
    found = _PARAMETER.findall(entry[: entry.index("\n)")])
    count = len(tensor_maps)
    if [size == str(TENSOR_MAP) for _, _, size in found[:count]] != tensor_maps or len(found) > count + 2:
        raise RuntimeError(f"its {len(found)} parameters are not the {count} of the launch and two of scratch memory")
    codes, offsets, end = "<", [], 0
    for i, (align, kind, size) in enumerate(found):
        code, width = (f"{size}s", int(size)) if size else PTX_TYPES[kind]
        begin = -(-end // int(align or width)) * int(align or width)
        codes += f"{begin - end}x" + (code if i < count else f"{width}x")
        offsets.append(begin)
        end = begin + width
    return struct.Struct(codes), offsets
