"""Compiling a launch, on any host, once for a process; and which Triton there is."""

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
"""The newest release of Triton that the kernels have run with; what a newer one makes of Hopper's own, nobody has measured."""

PTX_VERSIONS = {103: 88, 110: 90, 121: 88}
"""The first PTX that knows the GPU; 8.7, CUDA 12.8's, for all others. In a JAX program XLA's own assembler reads it; left alone
Triton stamps it for its own: 3.9 for CUDA 13.4's."""

NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES
"""What the system says of a folder that cannot be written."""

PATIENCE = 2
"""Seconds of compiling after which a terminal is told why nothing happens."""

_one_at_a_time = threading.RLock()
_left: list[str] = []
"""The cache of Triton that this process has left for one of its own."""

MODULES = {
    "forward": "portable.forward",
    "delta": "portable.backward_sums",
    "extent_bounds": "portable.backward_sums",
    "dq": "portable.backward_dq",
    "dkv": "portable.backward_dkv",
    "unpack_key_mask": "portable.loads",
    "dropout_streams": "portable.dropout",
    "decode": "portable.decode",
    "merge_pairs": "portable.decode",
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

    Launches that differ in array sizes only share it. Raises what Triton raised, the next time too: what does not compile is not
    compiled again, but where there was no room. Threads wait for each other.
    """
    of = launch.kernel, launch.signature, launch.constants, launch.divisible, launch.warps, launch.stages
    with _one_at_a_time:
        made = _compiled(*of, capability)
    if isinstance(made, Exception):
        raise made
    return made


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
    """The kernel, or the error."""
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
    except Exception as error:  # whatever Triton, LLVM or ptxas have to say
        return error.with_traceback(None)


def _source(kernel: str, types: dict[str, str], values: dict[str, Any], divisible: frozenset[str]) -> Any:
    """What Triton compiles: a kernel of given types, and values where they are known."""
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
    """The compiled kernel, from Triton's cache or put there; in a folder of this process where that has no room."""
    import triton
    from triton.backends.compiler import GPUTarget

    _find_cache()
    compile_it = lambda: triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with _told(source.fn.__name__), changed_for_products(triton_release()):
        try:
            return compile_it()
        except OSError as error:
            if error.errno not in NO_ROOM or _left:
                raise
            _leave_cache(error)
            return compile_it()


@cache
def _find_cache() -> None:
    """Have Triton keep its binaries in a folder of this process, where its own cannot be written, and say so."""
    folder = Path(cache_folder())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        _leave_cache(error)


def _leave_cache(error: OSError) -> None:
    """Have Triton keep its binaries in a folder of this process, and say so."""
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
    """Return the folder in which Triton keeps what it has compiled."""
    from triton import knobs

    return knobs.cache.dir


@cache
def broken_triton() -> str | None:
    """Return why Triton cannot be used here at all, None where it can."""
    try:
        if find_spec("triton") is None:
            return "the package triton is not installed: pip install triton"
        interpreted()
        cache_folder()
    except Exception as error:  # whatever the import of a broken installation raises
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"the package triton does not start ({said}): install it anew, pip install 'triton>=3.6'"
    return None


def triton_release() -> tuple[int, ...]:
    """Return major and minor number of the installed Triton: (0, 0) where there is none, a number above all where it has none."""
    version = triton_version()
    number = re.match(r"(\d+)\.(\d+)", version)
    return (int(number[1]), int(number[2])) if number else (sys.maxsize, 0) if version else (0, 0)


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
