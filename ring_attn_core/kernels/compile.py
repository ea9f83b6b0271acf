"""Compilation of launches, on any host and once per host, and information about the installed Triton.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from subprocess import Popen
from typing import Any

from ..releases import TRIED
from . import shipped, workers
from .launch import Launch, Specialization
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
_made: dict[Specialization, Any] = {}
"""The compiled kernels of this process, or Triton's errors."""
_begun: set[Specialization] = set()
"""The kernels that workers of this process compile, or have compiled."""
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


def start(launches: Iterable[Launch], capability: int, later: Iterable[Launch] = ()) -> list[Popen[bytes]]:
    """Compile the launches that Triton's cache lacks in processes of their own and return these; kernels of ``later`` follow. A
    single missing kernel is left to ``compile_launch``, which needs no process for it."""
    wanted: dict[Specialization, bool] = {}
    for at_once, some in ((False, later), (True, launches)):
        for launch in some:
            with suppress(Exception):  # of a Triton whose names have changed: ``compile_launch`` raises it again
                wanted[launch.specialization(capability)] = at_once
    with _one_at_a_time:
        _find_cache()
        missing = {spec: at_once for spec, at_once in wanted.items() if spec not in _made and _from_cache(spec) is None}
        if len(missing) < 2:
            return []
        started = workers.start(missing, cache_folder())
        _begun.update(started)
        return list({*started.values()})


def compile_launch(launch: Launch, capability: int) -> Any:
    """Compile a launch, without a GPU, for a compute capability such as 90, or wait for another process that compiles it. An
    error of Triton is cached and raised again; after OSError or MemoryError the next call compiles again."""
    spec = launch.specialization(capability)
    made = _made.get(spec)
    if made is None:
        with _one_at_a_time:
            made = _made.get(spec)
            if made is None:
                _find_cache()
                begun = len(_begun - _made.keys())
                with _slow_notice(begun), workers.alone(spec, cache_folder()), _slow_notice(not begun):
                    made = _made[spec] = compile_here(spec)
    if isinstance(made, Exception):
        raise made
    return made


@contextmanager
def _slow_notice(count: int) -> Iterator[None]:
    """Print a line on a terminal if the block takes longer than ``PATIENCE``, and erase it at the end; not at ``count`` 0."""
    shown = threading.Event()

    def notify() -> None:
        shown.set()
        said = f"Triton compiles {count} kernel{'s' * (count > 1)}, once for this machine ..."
        print(said, end="", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, notify)
    if count and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if shown.is_set():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def compile_here(spec: Specialization) -> Any:
    """Compile through Triton's cache, or a temporary folder if that cannot be written; return an error of Triton."""
    try:
        try:
            return _triton_compile(spec)
        except OSError as error:
            if error.errno not in NO_ROOM or _left:
                raise
            _leave_cache(error)
            return _triton_compile(spec)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # Triton, LLVM and ptxas may raise anything
        return error.with_traceback(None)


def is_cached(launch: Launch, capability: int) -> bool:
    """Return whether this process or Triton's cache has the kernel of a launch."""
    spec = launch.specialization(capability)
    with _one_at_a_time:
        return spec in _made or _from_cache(spec) is not None


@cache
def sources() -> str:
    """Return a hash of all files that kernels are made of."""
    here = Path(__file__).parent
    files = [*here.glob("portable/*.py"), *here.glob("hopper/*.py"), here / "tile_sizes.py"]
    files += [here.parent / "runs.py", here.parent / "dropout.py"]
    return sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


class _NotCached(Exception):
    """Raised where a compilation would begin."""


def _from_cache(spec: Specialization) -> Any | None:
    """Read a kernel from Triton's cache into ``_made`` and return it; return None if it is not there or damaged."""

    def stop(*_: Any) -> None:
        raise _NotCached

    try:
        _made[spec] = made = _triton_compile(spec, make_ir=stop)
    except Exception:  # what is wrong with it is said by ``compile_launch``
        return None
    return made


def _triton_compile(spec: Specialization, make_ir: Callable[..., Any] | None = None) -> Any:
    """Return a shipped kernel, or call Triton's compiler. ``make_ir``: called in place of its first stage."""
    if (found := shipped.load(spec, sources())) is not None:
        return found
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, types, values = kernel_function(spec.kernel), dict(spec.signature), dict(spec.constants)
    function.hash = sources()  # Triton's own depends on the kernels that the process has hashed before: no other one would match
    make = ASTSource
    if function.is_gluon():
        from .hopper.gluon import source as make
    source = make(
        function,
        signature={parameter: types.get(parameter, "constexpr") for parameter in function.arg_names},
        constexprs={(i,): values.get(parameter) for i, parameter in enumerate(function.arg_names) if parameter not in types},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, parameter in enumerate(function.arg_names)
            if types.get(parameter, "").startswith("*")
        },
    )
    if make_ir is not None:
        source.make_ir = make_ir
    options = {
        "num_warps": spec.warps,
        "num_stages": spec.stages,
        "enable_fp_fusion": True,
        "ptx_version": PTX_VERSIONS.get(spec.capability, 87),
    }
    with changed_for_products(triton_release()):
        return triton.compile(source, target=GPUTarget("cuda", spec.capability, 32), options=options)


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
        is_interpreted()
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
def is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 when this function is first called)."""
    from triton import knobs

    return knobs.runtime.interpret
