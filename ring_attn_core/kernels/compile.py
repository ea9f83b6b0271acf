"""Compiling a launch, on any host: what Triton makes of it, and in words why it does not run where it should."""

from __future__ import annotations

import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .binary import stack_bytes
from .launch import Launch
from .ptx import changed_for_products
from .tile_sizes import shared_memory

NEWEST_TRIED = 3, 9
"""The newest release of Triton that the kernels have run with; what a newer one makes of Hopper's own, nobody has measured."""

PTX_VERSIONS = {103: 88, 110: 90, 121: 88}
"""The first PTX that knows the GPU; 8.7, CUDA 12.8's, for all others. In a JAX program XLA's own assembler reads it; left alone
Triton stamps it for its own: 3.9 for CUDA 13.4's."""

MOST_STACK = {"hopper_forward": 512, "hopper_backward": 600}
"""Bytes of stack for registers that do not fit, above which "auto" passes over a kernel: more than any release that was tried
needs with every feature at once (432 and 568; parity_tests/core/hopper_launches.json)."""

PATIENCE = 2
"""Seconds of compiling after which a terminal is told why nothing happens."""


MODULES = {
    "forward": "portable.forward",
    "delta": "portable.backward_sums",
    "extent_bounds": "portable.backward_sums",
    "dq": "portable.backward_dq",
    "dkv": "portable.backward_dkv",
    "unpack_key_mask": "portable.loads",
    "dropout_streams": "portable.dropout",
    "hopper_forward": "hopper.forward",
    "hopper_backward": "hopper.backward",
    "hopper_dq": "hopper.backward_dq",
}
"""Where each kernel stands, by the name that a launch calls it by."""


def kernel_function(name: str) -> Any:
    """Return the Triton or Gluon function of a kernel, imported at the first launch."""
    return getattr(import_module(f"{__package__}.{MODULES[name]}"), name)


def compiled(launch: Launch, capability: int) -> Any:
    """Compile a launch for a GPU of compute capability ``capability``, such as 90; it needs no GPU.

    Launches that differ in array sizes only share it.
    """
    return _compiled(launch.kernel, launch.signature, launch.constants, launch.divisible, launch.warps, launch.stages, capability)


def obstacle(launches: Iterable[Launch], capability: int, spilling: bool = True) -> str | None:
    """Return why one of the launches cannot run on a GPU of compute capability ``capability``, None where all can.

    ``spilling``: a kernel may keep more registers in memory than when it was measured, and be slow for it.
    """
    if interpreted():
        return None
    most, triton = shared_memory(capability), f"Triton {triton_version()}"
    for launch in launches:
        its = f"its kernel {launch.kernel}"
        try:
            kernel = compiled(launch, capability)
        except Exception as error:  # whatever Triton, LLVM or ptxas have to say
            said = (str(error).strip() or type(error).__name__).splitlines()[-1]
            return f"{its} does not compile with {triton}: {said}"
        if kernel.metadata.shared > most:
            return f"{its} needs {kernel.metadata.shared} bytes of shared memory, and sm_{capability} has {most}"
        bound = MOST_STACK.get(launch.kernel)
        if not spilling and bound is not None and (stack := stack_bytes(kernel.asm["cubin"])) > bound:
            return f"{triton} compiles {its} with {stack} bytes of registers in memory: with more than {bound} it is slow"
    return None


@contextmanager
def _told(kernel: str) -> Iterator[None]:
    """Say on the terminal, where there is one, what takes longer than ``PATIENCE``: in a line that is gone when it ends."""
    shown = threading.Event()

    def tell() -> None:
        shown.set()
        print(f"Triton compiles {kernel}, once for this machine ...", end="", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, tell)
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if shown.is_set():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@cache
def _compiled(
    kernel: str,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    divisible: frozenset[str],
    warps: int,
    stages: int,
    capability: int,
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernel_function(kernel)
    types, values = dict(signature), dict(constants)
    make = ASTSource
    if function.is_gluon():
        from .hopper.gluon import source as make
    source = make(
        function,
        signature={parameter: types.get(parameter, "constexpr") for parameter in function.arg_names},
        constexprs={(i,): values.get(parameter) for i, parameter in enumerate(function.arg_names) if parameter not in types},
        attrs={(function.arg_names.index(parameter),): [["tt.divisibility", 16]] for parameter in sorted(divisible)},
    )
    options = {
        "num_warps": warps,
        "num_stages": stages,
        "enable_fp_fusion": True,
        "ptx_version": PTX_VERSIONS.get(capability, 87),
    }
    _find_cache()
    with _told(kernel), changed_for_products(triton_release()):
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@cache
def _find_cache() -> None:
    """Have Triton keep its binaries in a folder of this process, where its own cannot be written, and say so."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        knobs.cache.dir = tempfile.mkdtemp(prefix="triton-")
        warnings.warn(
            f"Triton cannot write its cache, {folder} ({error.strerror}): every process compiles its kernels anew, this one into "
            f"{knobs.cache.dir}. Set TRITON_CACHE_DIR to a folder that can be written",
            stacklevel=2,
        )


def triton_release() -> tuple[int, ...]:
    """Return major and minor number of the installed Triton, (0, 0) where there is none under that name."""
    words = triton_version().split(".")[:2]
    return tuple(map(int, words)) if all(word.isdecimal() for word in words) else (0, 0)


def triton_version() -> str:
    """Return the version of the Triton that is imported, or would be; "" where there is none under that name."""
    if (triton := sys.modules.get("triton")) is not None and hasattr(triton, "__version__"):
        return triton.__version__
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


@cache
def interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, on a CPU: TRITON_INTERPRET=1 was set when it was first imported."""
    from triton import knobs

    return knobs.runtime.interpret
