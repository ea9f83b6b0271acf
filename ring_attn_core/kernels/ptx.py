"""What is changed in PTX between Triton and the assembler: where the descriptors of Hopper's products are computed.

A product (wgmma) finds a factor in shared memory by a descriptor of 64 bits, of which the low ones hold the address. A tile of 128
x 128 is multiplied in eight parts, and their descriptors differ by constants. Up to 3.8 Triton adds these to the descriptor, and
the assembler does so in uniform registers, right before the product. From 3.9 on Triton adds them to the address, in 32 bits, and
puts the descriptor together of two words each time. LLVM then computes all eight far ahead of their products, and the assembler
keeps them in registers of threads, 16 of them, or in memory:

    registers reloaded in a step               3.6    3.9    3.9, folded
    backward, heads of 128 (385 instructions)    5     33      0      TFLOP/s on one H200, causal: 531, 377
    forward, heads of 128, q in registers        0     40      0

``fold_descriptors`` computes each once more, as 3.8 does, right before its product. That changes no value.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

FIRST = 3, 9
"""The first release of Triton whose descriptors need it."""

ADDRESS_BITS = 15
"""Of a descriptor: the address in shared memory in units of 16 bytes (PTX ISA, matrix-descriptor format; Triton keeps one more)."""

_DEFINITION = re.compile(r"^\s*([a-z][\w.]*)\s+(%\w+), ([^;{}]*);", re.MULTILINE)
_PRODUCT = re.compile(r"^.*\bwgmma\.mma_async\b.*$", re.MULTILINE)
OF_CUDA_12 = 80
"""A GPU for which Triton 3.9 takes the older of its two assemblers, of CUDA 12.9. For Hopper it takes that of CUDA 13.4."""

_lock = threading.Lock()
_inside = 0
_before: Callable[..., Any] | None = None


def fold_descriptors(ptx: str) -> str:
    """PTX in which every descriptor ``high << 32 | address + constant`` is made once more, by one addition, before its product.

    Left alone is whatever is not exactly of that form, with an address of at most 15 bits, in registers that are set only once.
    """
    found = [(match[2], match[1], match[3].split(", ")) for match in _DEFINITION.finditer(ptx)]
    times = Counter(register for register, _, _ in found)
    defined = {register: (operation, operands) for register, operation, operands in found if times[register] == 1}

    def product(match: re.Match[str]) -> str:
        registers = sorted(set(re.findall(r"%rd\d+", match[0])))
        made = ((register, _descriptor(register, defined)) for register in registers)
        again = [
            f"\tcvt.u64.u32 {register}, {of[0]};\n\tadd.s64 {register}, {register}, {of[1]};\n" for register, of in made if of
        ]
        return "".join(again) + match[0]

    return _PRODUCT.sub(product, ptx)


def _descriptor(register: str, defined: dict[str, tuple[str, list[str]]]) -> tuple[str, int] | None:
    """The register of the address and the constant that a descriptor is the sum of; None where it is made in another way."""

    def step(register: str, *operations: str) -> tuple[str, int]:
        """What ``register`` is made of by one of the operations; KeyError for any other."""
        operation, (first, *second) = defined[register]
        if operation not in operations:
            raise KeyError(operation)
        return first, int(second[0]) if second else 0

    try:
        low, high = step(register, "or.b64")
        word, _ = step(low, "cvt.u64.u32")
        address, constant = step(word, "add.s32", "or.b32") if defined[word][0] in ("add.s32", "or.b32") else (word, 0)
        operation, bits = defined[address]
    except (KeyError, ValueError):
        return None
    masked = (operation == "bfe.u32" and bits[2:] == [str(ADDRESS_BITS)]) or (
        operation == "and.b32" and bits[1:] == [str(2**ADDRESS_BITS - 1)]
    )
    added = defined[word][0] != "or.b32" or constant % 2**ADDRESS_BITS == 0
    whole = 0 <= constant < 2**32 - 2**ADDRESS_BITS and high % 2**32 == 0
    return (address, high + constant) if masked and added and whole else None


@contextmanager
def in_our_way(release: tuple[int, ...]) -> Iterator[None]:
    """Whatever Triton compiles meanwhile, in any thread, has its descriptors folded and is read by the assembler of CUDA 12.

    Of Triton older than 3.9 nothing is changed.
    """
    from triton import knobs

    global _inside, _before
    if release < FIRST or not hasattr(knobs.runtime, "add_stages_inspection_hook"):
        yield
        return
    with _lock:
        if _inside == 0:
            _before = knobs.runtime.add_stages_inspection_hook
            knobs.runtime.add_stages_inspection_hook = _add_stages
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                knobs.runtime.add_stages_inspection_hook = _before


def _add_stages(*of: Any) -> tuple[str, str] | None:
    """Triton asks for a key of its cache, by no arguments, then for the stages (backend, stages, options, language, GPU)."""
    if not of:
        key = sha256(Path(__file__).read_bytes()).hexdigest() + _older_assembler()
        before = _before() if _before else ("", "")
        return before[0] + key, before[1] + key
    if _before:
        _before(*of)
    backend, stages, options, _, capability = of
    make_ptx = stages["ptx"]
    stages["ptx"] = lambda source, metadata: fold_descriptors(make_ptx(source, metadata))
    if capability == 90 and _older_assembler():
        older = copy(backend)
        older.target = replace(backend.target, arch=OF_CUDA_12)
        stages["cubin"] = lambda source, metadata: older.make_cubin(source, metadata, options, capability)
    return None


def _older_assembler() -> str:
    """The version of Triton's assembler for GPUs before Hopper; "" where there is none."""
    from triton import knobs

    try:
        return knobs.nvidia.ptxas.version
    except (AttributeError, RuntimeError):
        return ""
