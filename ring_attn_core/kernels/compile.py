"""Compilation of launches, on any host and once per process, and information about the installed Triton.

Triton's on-disk cache holds the binaries. If its folder cannot be written, this process uses a temporary folder instead.
"""

from __future__ import annotations

import atexit
import errno
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from typing import Any

from ..releases import TRIED
from .launch import Launch
from .ptx import changed_for_products

NEWEST_TRIED = TRIED["triton"][-1]
"""The newest release of Triton that passed the tests; Hopper's kernels have not been measured with newer releases."""

PTX_VERSIONS = {103: 88, 110: 90, 121: 88}
"""The first PTX version (times 10) that supports a GPU, by compute capability; other GPUs get 8.7 (CUDA 12.8). By default Triton
writes the version of its own assembler, but in a JAX program XLA's assembler, which may be older, reads the PTX."""

NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES
"""The error numbers of a write into a folder that is full, read-only or forbidden."""

PATIENCE = 2
"""Seconds of compilation after which a message appears on the terminal."""

_one_at_a_time = threading.RLock()
_left: list[str] = []
"""A list with Triton's own cache folder, if this process uses a temporary folder in its place; else empty."""

MODULES = {
    "forward": "portable.forward",
    "delta": "portable.backward_sums",
    "extent_bounds": "portable.backward_sums",
    "key_tiles": "portable.extent_lists",
    "tile_order": "portable.extent_lists",
    "query_tiles": "portable.extent_lists",
    "key_ranges": "portable.extent_lists",
    "intervals": "portable.extent_lists",
    "not_finite": "portable.extent_lists",
    "dq": "portable.backward_dq",
    "dkv": "portable.backward_dkv",
    "unpack_key_mask": "portable.loads",
    "philox_keys": "portable.dropout",
    "decode": "portable.decode",
    "merge_pairs": "portable.decode",
    "hopper_forward": "hopper.forward",
    "hopper_backward": "hopper.backward",
    "hopper_dq": "hopper.backward_dq",
    "hopper_wide_dq": "hopper.wide_dq",
    "hopper_wide_dkv": "hopper.wide_dkv",
}
"""The module of each kernel, by the name that launches use."""


def kernel_function(name: str) -> Any:
    """Import the module of a kernel and return its Triton or Gluon function."""
    return getattr(import_module(f"{__package__}.{MODULES[name]}"), name)


def compiled(launch: Launch, capability: int) -> Any:
    """Compile a launch for a GPU of compute capability ``capability``, such as 90, and return Triton's compiled kernel.

    The host needs no GPU. Launches share the result if they have the same kernel, types, constants, warps and stages, and if 16
    divides the same arguments. An error of Triton is cached, and later calls raise it again. After OSError or MemoryError the
    next call compiles again. One thread compiles at a time, and the others wait.
    """
    of = launch.kernel, launch.signature, launch.constants, launch.divisible, launch.warps, launch.stages
    with _one_at_a_time:
        made = _compiled(*of, capability)
    if isinstance(made, Exception):
        raise made
    return made


@contextmanager
def _slow_notice(kernel: str) -> Iterator[None]:
    """Print a line if stderr is a terminal and the with block takes longer than ``PATIENCE``; erase the line at the end."""
    shown = threading.Event()

    def notify() -> None:
        shown.set()
        print(f"Triton compiles {kernel}, once for this machine ...", end="", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, notify)
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
    """Compile a kernel and return it, or return the error of Triton; cache either. Raise OSError and MemoryError, uncached."""
    try:
        source = _source(kernel, dict(signature), dict(constants), divisible)
        options = {
            "num_warps": warps,
            "num_stages": stages,
            "enable_fp_fusion": True,
            "ptx_version": PTX_VERSIONS.get(capability, 87),
        }
        return _kept(source, capability, options)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # Triton, LLVM and ptxas may raise anything
        return error.with_traceback(None)


def _source(kernel: str, types: dict[str, str], values: dict[str, Any], divisible: frozenset[str]) -> Any:
    """Return Triton's source record of a kernel, with the types of its arguments and the values of its constants."""
    from triton.compiler import ASTSource

    function = kernel_function(kernel)
    make = ASTSource
    if function.is_gluon():
        from .hopper.gluon import source as make
    return make(
        function,
        signature={parameter: types.get(parameter, "constexpr") for parameter in function.arg_names},
        constexprs={(i,): values.get(parameter) for i, parameter in enumerate(function.arg_names) if parameter not in types},
        attrs={(function.arg_names.index(parameter),): [["tt.divisibility", 16]] for parameter in sorted(divisible)},
    )


def _kept(source: Any, capability: int, options: dict[str, Any]) -> Any:
    """Compile a source through Triton's cache folder, or through a temporary folder if Triton's cannot be written."""
    import triton
    from triton.backends.compiler import GPUTarget

    _find_cache()
    compile_it = lambda: triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with _slow_notice(source.fn.__name__), changed_for_products(triton_release()):
        try:
            return compile_it()
        except OSError as error:
            if error.errno not in NO_ROOM or _left:
                raise
            _leave_cache(error)
            return compile_it()


@cache
def _find_cache() -> None:
    """Test that Triton's cache folder can be written; if not, warn and use a temporary folder."""
    folder = Path(cache_folder())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        _leave_cache(error)


def _leave_cache(error: OSError) -> None:
    """Switch Triton's cache to a temporary folder, which is deleted at exit, and warn."""
    from triton import knobs

    folder, knobs.cache.dir = knobs.cache.dir, tempfile.mkdtemp(prefix="triton-")
    _left.append(folder)
    atexit.register(rmtree, knobs.cache.dir, ignore_errors=True)
    warnings.warn(
        f"Triton cannot write its cache, {folder} ({error.strerror}): every process compiles its kernels anew, this one into "
        f"{knobs.cache.dir}. Set TRITON_CACHE_DIR to a folder that can be written and has room",
        stacklevel=2,
    )


def cache_folder() -> str:
    """Return Triton's cache folder."""
    from triton import knobs

    return knobs.cache.dir


@cache
def broken_triton() -> str | None:
    """Return the reason why Triton cannot be imported, such as a missing package; return None if the import works."""
    try:
        if find_spec("triton") is None:
            return "the package triton is not installed: pip install triton"
        interpreted()
        cache_folder()
    except Exception as error:  # the import of a broken installation may raise anything
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"the package triton does not start ({said}): install it anew, pip install 'triton>=3.6'"
    return None


def triton_release() -> tuple[int, ...]:
    """Return Triton's (major, minor) version: (0, 0) without Triton, (sys.maxsize, 0) if it does not begin with two numbers."""
    version = triton_version()
    number = re.match(r"(\d+)\.(\d+)", version)
    return (int(number[1]), int(number[2])) if number else (sys.maxsize, 0) if version else (0, 0)


def triton_version() -> str:
    """Return the version of the imported Triton, else of the installed one; return an empty string without Triton."""
    if (triton := sys.modules.get("triton")) is not None and hasattr(triton, "__version__"):
        return triton.__version__
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


@cache
def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 when this function is first called)."""
    from triton import knobs

    return knobs.runtime.interpret
