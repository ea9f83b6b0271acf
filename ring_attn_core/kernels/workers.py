"""Compilation of kernels in processes of their own, and the locks by which the processes of a host share the work.

A kernel that is being compiled has a locked file beside Triton's cache. The process that gets the lock compiles the kernel, or
hands the lock to a worker that does; the others wait for the lock, and then find the kernel in the cache. The lock of a process
that ends, killed or not, is free, so another process compiles what it left.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from .launch import Specialization

LIMIT = 300.0
"""Seconds to wait for another process before compiling the kernel here too."""
INTERVAL = 0.02
"""Seconds between two looks at a lock."""


def start(missing: Mapping[Specialization, bool], cache: str) -> dict[Specialization, subprocess.Popen[bytes]]:
    """Start workers that compile kernels into Triton's ``cache``, and return each kernel's worker. ``missing``: whether a kernel
    is needed at once; the others follow. Kernels that other processes compile are left out."""
    # The longest to compile first: those of Hopper.
    ordered = sorted(missing, key=lambda spec: (not missing[spec], "hopper" not in spec.kernel))
    jobs: list[tuple[Specialization, int]] = []
    for spec in ordered:
        with suppress(BlockingIOError):
            lock = _lock(spec, cache)
            if lock is not None:
                jobs.append((spec, lock))
    started = {}
    with suppress(OSError):  # no memory or no process is left: ``compiled`` compiles in its own process
        at_once = sum(missing[spec] for spec, _ in jobs) or len(jobs)
        for first in range(count := min(at_once, os.cpu_count() or 1)):
            worker = _start_worker(jobs[first::count], cache)
            started |= {spec: worker for spec, _ in jobs[first::count]}
    for _, lock in jobs:
        os.close(lock)  # the workers hold their own copies
    return started


def _start_worker(jobs: Sequence[tuple[Specialization, int]], cache: str) -> subprocess.Popen[bytes]:
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.compile_worker import main; main()"
    worker = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # its errors come again where the kernel is needed
        pass_fds=[lock for _, lock in jobs],
    )
    assert worker.stdin is not None
    with worker.stdin:
        worker.stdin.write(pickle.dumps((jobs, cache)))
    threading.Thread(target=worker.wait, daemon=True).start()  # else it would stay a zombie
    return worker


@contextmanager
def alone(spec: Specialization, cache: str) -> Iterator[None]:
    """Wait until no other process of this host compiles a kernel, at most ``LIMIT`` seconds; hold its lock within the block."""
    lock, end = None, time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            lock = _lock(spec, cache)
            break
        except BlockingIOError:
            time.sleep(INTERVAL)
    try:
        yield
    finally:
        unlock(lock)


def _lock(spec: Specialization, cache: str) -> int | None:
    """Lock a kernel's file and return its descriptor, or None without locks; raise BlockingIOError if it is locked."""
    file = None
    try:
        import fcntl

        folder = Path(cache, "ring-attn-locks")
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / sha256(repr(spec).encode()).hexdigest()[:32], os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if file is not None:
            os.close(file)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return file


def unlock(lock: int | None) -> None:
    """Free a lock and close its file."""
    if lock is not None:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_UN)  # frees it for copies of the descriptor too, which a fork may have made
        os.close(lock)
