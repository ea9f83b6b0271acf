"""Processes that have imported JAX and PyTorch already: forked from a server, they start in hundredths of a second.

Except for the imports, a program sees the state of a fresh interpreter. Programs that a test starts itself use fresh
interpreters: parity_tests/support/programs.py.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import runpy
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

QUICK = "" if shutil.which("nvidia-smi") else "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA_FLAGS for programs that take longer to compile than to run, as tests on CPUs do; parity_tests/jax/ring.py has more."""

CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[2] / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
"""Variables that JAX reads on import: compiling takes most of the time of its tests, and the next run reuses the programs."""

PATIENCE = 600
"""Seconds after which a program counts as hanging."""

HUGGING_FACE = "parity_tests.torch.hugging_face"
MODULES = {
    "torch": (
        *("torch.distributed", "torch.fx.experimental.symbolic_shapes", "ring_attn_torch"),  # the second at a first backward
        *("pytest", "parity_tests.fuzz", "parity_tests.torch.ring"),  # what the files of tests import, and the cases
    ),
    "jax": ("jax", "flax.nnx", "optax", "ring_attn_jax"),
    HUGGING_FACE: (
        "transformers.trainer",
        "parity_tests.torch.hugging_face",
        *(
            f"transformers.models.{name}.modeling_{name}"
            for name in ("llama", "mistral", "qwen3", "qwen2_5_vl", "gemma2", "gemma3")
        ),
        *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt_oss", "llama4", "modernbert", "phi3")),
    ),
}
"""Modules that the server imports in addition if the tests have imported the key, because these imports take seconds.

Those of transformers only if the first who needs the server names them: another worker does without them.
"""

preloaded: list[str] = []
"""The keys of ``MODULES`` in the server; [] before it starts."""


def collect_rarely() -> None:
    """Look for reference cycles after 50,000 new objects instead of some thousand, and never among those of the imports.

    Tracing makes many objects while the frameworks hold millions, and a full search visits them all.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def hash_apart(rank: int) -> None:
    """Let each rank hash records to other numbers, as ranks of torchrun do: forks of one server hash texts alike."""
    from ring_attn_core.problem.options import Options
    from ring_attn_core.problem.problem import Problem
    from ring_attn_core.records import HASH

    for record in (Options, Problem):

        def hashed(self: Any, of_fields: Callable[[Any], int] = record.__hash__) -> int:
            if HASH not in vars(self):
                vars(self)[HASH] = of_fields(self) ^ rank
            return vars(self)[HASH]

        record.__hash__ = hashed  # type: ignore[method-assign]


def context(*needed: str) -> Any:
    """Return the context of multiprocessing whose processes are forked from the server.

    The server starts with the first process. ``needed``: keys of ``MODULES`` that it imports in any case.
    """
    forked = multiprocessing.get_context("forkserver")
    if not preloaded:
        preloaded.extend(name for name in MODULES if name in needed or name in {*sys.modules} - {HUGGING_FACE})
        forked.set_forkserver_preload([each for name in preloaded for each in MODULES[name]])
    return forked


def run(
    arguments: Sequence[str],
    framework: str,
    folder: Path,
    variables: dict[str, str],
    processes: int | None = None,
    errors: bool = False,
) -> str:
    """Run ``python *arguments``, a file or ``-m`` and a module, and return its output; fail with its standard error.

    ``processes``, one or several, get the variables that torchrun would set; without a number one process gets none of them.
    ``errors``: return what went to standard error too.
    """
    forked = context(framework)
    with tempfile.TemporaryDirectory(prefix="ring-attn-") as printed:
        started = []
        ring = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
        ring |= {"MASTER_PORT": str(free_port())} if processes else {}
        for rank in range(processes or 1):
            own = variables | (ring | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes else {})
            out = Path(printed, f"out{rank}"), Path(printed, f"err{rank}")
            process = forked.Process(target=_program, args=(list(arguments), str(folder), own, *map(str, out)))
            process.start()
            started.append((process, *out))
        _wait([process for process, _, _ in started])
        texts = ["".join(file.read_text() for _, *files in started if (file := files[i]).exists()) for i in range(2)]
    codes = [process.exitcode for process, _, _ in started]
    assert not any(codes), f"exit status {codes}\n{texts[0][-2000:]}\n{texts[1][-4000:]}"
    return "".join(texts) if errors else texts[0]


def _wait(processes: list[Any]) -> None:
    """Wait for all processes. End the others once one has failed, or after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while any(process.is_alive() for process in processes):
        if time.monotonic() > end or any(process.exitcode for process in processes):
            time.sleep(1)  # for the output of the others
            for process in processes:
                process.kill()
        multiprocessing.connection.wait([process.sentinel for process in processes if process.is_alive()], timeout=1)
    for process in processes:
        process.join()


def _program(arguments: list[str], folder: str, variables: dict[str, str], out: str, err: str) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), stream.fileno())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    hash_apart(int(variables.get("RANK", 0)))
    if "jax" in sys.modules and "JAX_NUM_CPU_DEVICES" in variables:  # JAX reads it on import
        sys.modules["jax"].config.update("jax_num_cpu_devices", int(variables["JAX_NUM_CPU_DEVICES"]))
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], folder
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, str(Path(folder, arguments[0]).parent)
            runpy.run_path(str(Path(folder, arguments[0])), run_name="__main__")  # the full path, for processes that it spawns
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def free_port() -> int:
    """Return a TCP port of this host that no process listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
