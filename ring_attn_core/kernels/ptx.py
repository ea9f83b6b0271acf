"""Rewrites of Hopper kernels' PTX that undo slowdowns by newer releases of Triton, and the choice of ptxas.

The tensor-core instruction wgmma multiplies A and B. It reads B, and usually A, from shared memory by a 64-bit descriptor that
holds the address in its low bits. A tile of 128 x 128 takes eight instructions, whose descriptors differ by constants. Three
changes in Triton made the kernels slower:

    3.8   If A is in registers, Triton copies A to other registers before the wgmma. ``as_before`` removes the copies
    3.9   Triton adds the constants to the 32-bit address and assembles each descriptor from two 32-bit words. LLVM computes
          all eight descriptors early, so they occupy 16 registers of each thread, or spill to memory. Before 3.9, the constant
          was added to the 64-bit descriptor, in uniform registers, right before its wgmma; ``as_before`` restores this addition
    3.9   Triton assembles for Hopper with ptxas of CUDA 13.4. It still ships ptxas of CUDA 12.9, which our kernels use

No computed value changes. The table holds measurements with Triton 3.9: the spilled registers reloaded in one unmasked step of
the inner loop (about 395 instructions in the backward, 465 in the forward), and the throughput relative to Triton 3.6 in the
same run (one H200, causal, 16,384 tokens, 16 heads of 128):

                                      backward                forward
    as Triton compiles it             33 reloads, 0.71        40 reloads
    as_before, ptxas 13.4              0 reloads, 1.01         0 reloads, 0.99
    as_before, ptxas 12.9              0 reloads, 1.01         0 reloads, 1.00

With 4 sequences of 4,096 tokens the forward reaches 0.98 with ptxas 13.4 and 1.00 with ptxas 12.9.

The backward also needs ``register_layouts.here`` and ``gluon.wait_for_products``, the forward ``forward_softmax.row_maximum``.
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

FIRST = 3, 8
"""The first release of Triton whose PTX is changed."""

ADDRESS = {"bfe.u32": "15", "and.b32": "32767"}
"""The instructions that cut an address to 15 bits, each with its last operand (PTX ISA, matrix descriptors)."""

OLDER_GPU = 80
"""A compute capability for which Triton 3.9 still uses the older of its two assemblers."""

_REGISTER = re.compile(r"%\w+")
_PRODUCT = re.compile(r"^.*\bwgmma\.mma_async\b.*$", re.MULTILINE)
_WRITTEN = re.compile(r"(?:^|[;{}])\s*(?:@!?%\w+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)", re.MULTILINE)
_DEFINITION = re.compile(r"^\s*([a-z][\w.]*)\s+(%\w+), ([^;{}]*);$", re.MULTILINE)

Definitions = dict[str, tuple[str, list[str]]]
"""{register: (operation, operands)}: the instruction that defines the register, for each register that is written once."""

_lock = threading.Lock()
_threads: list[int] = []
"""Identifiers of the threads that compile our kernels, one entry for each running block of ``changed_for_products``."""
_before: Callable[..., Any] | None = None


def as_before(ptx: str) -> str:
    """Rewrite PTX so that wgmma gets registers and descriptors as in Triton 3.7; no computed value changes."""
    written = Counter(register for registers in _WRITTEN.findall(ptx) for register in _REGISTER.findall(registers))
    found = ((match[2], (match[1], match[3].split(", "))) for match in _DEFINITION.finditer(ptx))
    definitions = {register: definition for register, definition in found if written[register] == 1}
    copied = _copies(ptx, definitions, written)

    def product(match: re.Match[str]) -> str:
        text = _REGISTER.sub(lambda register: copied.get(register[0], register[0]), match[0])
        lines = []
        for register in sorted(set(_REGISTER.findall(text))):
            if (sum_of := _descriptor(register, definitions)) is not None:
                address, constant = sum_of
                lines += [f"\tcvt.u64.u32 {register}, {address};", f"\tadd.s64 {register}, {register}, {constant};"]
        return "\n".join([*lines, text])

    lines = (line for line in ptx.split("\n") if not ((match := _DEFINITION.match(line)) and match[2] in copied))
    return _PRODUCT.sub(product, "\n".join(lines))


def _copies(ptx: str, definitions: Definitions, written: Counter[str]) -> dict[str, str]:
    """Return {copy: source} for each register that is a copy of another register and that only wgmma instructions read."""
    uses, in_products = Counter(_REGISTER.findall(ptx)), Counter(_REGISTER.findall("".join(_PRODUCT.findall(ptx))))
    moved = {register: operands[0] for register, (operation, operands) in definitions.items() if operation == "mov.b32"}
    return {
        register: source
        for register, source in moved.items()
        if written[source] == 1 and in_products[register] == uses[register] - 1
    }


def _descriptor(register: str, definitions: Definitions) -> tuple[str, int] | None:
    """Return (address register, constant) if ``register`` holds a descriptor computed as the sum of these two, else None."""
    operation, operands = definitions.get(register, ("", []))
    if operation != "or.b64" or not operands[1].isdecimal() or int(operands[1]) % 2**32:
        return None
    low, high = operands
    operation, operands = definitions.get(low, ("", []))
    word = operands[0] if operation == "cvt.u64.u32" else ""
    operation, operands = definitions.get(word, ("", []))
    if operation not in ("add.s32", "or.b32") or not operands[1].isdecimal():
        return None
    address, constant = operands[0], int(operands[1])
    cut, operands = definitions.get(address, ("", []))
    disjoint = operation == "add.s32" or constant % 2**15 == 0
    if ADDRESS.get(cut) != (operands or [""])[-1] or not disjoint or constant >= 2**31:
        return None
    return address, int(high) + constant


@contextmanager
def changed_for_products(release: tuple[int, ...]) -> Iterator[None]:
    """Apply ``as_before`` in the block to the PTX that this thread compiles, if Triton's ``release`` is 3.8 or later."""
    from triton import knobs

    global _before
    runtime: Any = knobs.runtime
    if release < FIRST or not hasattr(runtime, "add_stages_inspection_hook"):
        yield
        return
    with _lock:
        if not _threads:
            _before = runtime.add_stages_inspection_hook
            runtime.add_stages_inspection_hook = _add_stage
        _threads.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _threads.remove(threading.get_ident())
            if not _threads:
                runtime.add_stages_inspection_hook = _before


def _add_stage(*arguments: Any) -> tuple[str, str] | None:
    """Act as Triton's ``add_stages_inspection_hook`` for the threads that compile our kernels, and call an earlier hook too.
    Without arguments, return two strings that become part of the cache key. With a backend and its stages, apply ``as_before`` to
    the PTX, and on Hopper assemble with the older ptxas if Triton ships one."""
    if threading.get_ident() not in _threads:
        return _before(*arguments) if _before else None if arguments else ("", "")
    older = older_assembler()
    if not arguments:
        key = sha256(Path(__file__).read_bytes()).hexdigest() + (older or "")
        before = _before() if _before else ("", "")
        return before[0] + key, before[1] + key
    if _before:
        _before(*arguments)
    backend, stages, options, _, capability = arguments
    make_ptx = stages["ptx"]
    stages["ptx"] = lambda source, metadata: as_before(make_ptx(source, metadata))
    if older and capability == 90:
        older_backend = copy(backend)
        older_backend.target = replace(backend.target, arch=OLDER_GPU)
        stages["cubin"] = lambda source, metadata: older_backend.make_cubin(source, metadata, options, capability)
    return None


def older_assembler() -> str | None:
    """Return the version of the ptxas that Triton uses for GPUs before Hopper, or None if Triton has none."""
    from triton import knobs

    try:
        return knobs.nvidia.ptxas.version
    except (AttributeError, RuntimeError):
        return None
