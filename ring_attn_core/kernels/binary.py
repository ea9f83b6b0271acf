"""A reader of compiled kernels' binaries (ELF): it finds their stack size without CUDA's tools."""

from __future__ import annotations

import struct
from collections.abc import Iterator

FRAME_SIZE = 0x11
"""The code of the attribute that holds a kernel's index and its stack size in bytes. It is an attribute of the section
`.nv.info`, and `cuobjdump -elf` prints it under this name."""
WITH_SIZE = 0x04
"""The format code of attributes whose third field is a size: the number of bytes that follow this field."""


def stack_bytes(cubin: bytes) -> int:
    """Return the stack in bytes per thread, which holds spilled registers, summed over all kernels of a binary."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"a kernel's binary begins with {cubin[:5]!r}, which is not a 64-bit ELF file")
    return sum(size for name, section in _sections(cubin) if name == ".nv.info" for size in _frame_sizes(section))


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each section, from the section header table (System V ABI)."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    width, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + width * index) for index in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, offset, size in headers:
        begin = names + name
        yield elf[begin : elf.index(b"\0", begin)].decode(), elf[offset : offset + size]


def _frame_sizes(section: bytes) -> Iterator[int]:
    at = 0
    while at + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == WITH_SIZE:
            if attribute == FRAME_SIZE:
                yield struct.unpack_from("<II", section, at)[1]
            at += size
