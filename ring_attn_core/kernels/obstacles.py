"""Reasons why kernel launches cannot run on a GPU, found by compiling them; backend="auto" then takes another backend."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .binary import stack_bytes
from .bound_launch import layout, parameters
from .compile import cache_folder, compile_launch, is_interpreted, triton_version
from .launch import Launch
from .tile_sizes import shared_memory

MAX_STACK = {"hopper_forward": 512, "hopper_backward": 600, "hopper_wide_dq": 600, "hopper_wide_dkv": 600}
"""The largest stack, in bytes of spilled registers per thread, at which "auto" takes a kernel. Kernels not named have no limit.
With Triton 3.6 and 3.9, heads of 64 and 128 need at most 352 bytes in the forward and 560 in the backward, with any features
(parity_tests/core/hopper_launches.json)."""


def obstacle(launches: Iterable[Launch], capability: int, spilling: bool = True) -> str | None:
    """Return why one of the launches cannot run, or None; ``spilling``: also accept stacks above ``MAX_STACK``."""
    if is_interpreted():
        return None
    for launch in launches:
        try:
            kernel = compile_launch(launch, capability)
        except Exception as error:  # Triton, LLVM and ptxas may raise anything
            return f"its kernel {launch.kernel} does not compile with Triton {triton_version()}: {cause_of(error)}"
        reason = _of_kernel(launch, kernel, capability, spilling)
        if reason is not None:
            return reason
    return None


def _of_kernel(launch: Launch, kernel: Any, capability: int, spilling: bool) -> str | None:
    """Return why a compiled kernel cannot run, or None. If not ``spilling``, also refuse a stack above ``MAX_STACK``."""
    its, triton, most = f"its kernel {launch.kernel}", f"Triton {triton_version()}", shared_memory(capability)
    if kernel.metadata.shared > most:
        return f"{its} needs {kernel.metadata.shared} bytes of shared memory, and sm_{capability} has {most}"
    try:
        stack = stack_bytes(kernel.asm["cubin"])
    except Exception as error:  # a damaged binary may raise anything
        return f"the binary of {its} is damaged ({cause_of(error)}): delete {cache_folder()}, where Triton keeps it"
    bound = MAX_STACK.get(launch.kernel)
    if not spilling and bound is not None and stack > bound:
        return f"{triton} compiles {its} with {stack} bytes of registers in memory: with more than {bound} it is slow"
    try:
        values = parameters(launch, kernel).values
        layout(kernel.asm["ptx"], [isinstance(value, bytes) for value in values])
    except Exception as error:  # Triton's attributes or the parameters may have changed
        return f"{its} cannot be started as {triton} compiles it: {cause_of(error)}"
    return None


def cause_of(error: BaseException) -> str:
    """Summarize an error of Triton, LLVM or ptxas in one line, without the names of temporary PTX files."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [re.sub(r"\S*\.ptx\b", "its PTX", line.strip()) for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("PTXAS error", "Repro command", "^"))]
    errors = [line for line in lines if re.search(r"\b(fatal|error) *:", line)] or lines[-1:]
    return ": ".join([type(error).__name__, *errors[:1]])
