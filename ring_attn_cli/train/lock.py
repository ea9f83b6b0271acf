"""The lock of a run's folder: a second run would overwrite the checkpoints, log and weights of the first."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from .config import Config

LOCK = ".lock"


@contextmanager
def hold(config: Config, first: bool = True, share: Callable[[str], str] = str) -> Iterator[None]:
    """Lock the folder of a run until the block ends.
    ``first``: True in the one process that locks. ``share``: returns the first process's text in each process. The system
    releases the lock of a killed process; on a file system without locks nothing keeps other runs out."""
    # filelock's fallback for such file systems is a file that outlives a kill and would block the next run
    lock = FileLock(Path(config.out, LOCK), timeout=0, fallback_to_soft=False)
    try:
        if objection := share(_acquire(lock, config.out) if first else ""):
            raise ValueError(objection)
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, out: str) -> str:
    """Acquire the lock, and write process and host into its file. Return "", or the reason why no run may start in ``out``."""
    path = Path(lock.lock_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}): pass another --out FOLDER"
    try:
        lock.acquire()
    except Timeout:
        who = path.read_text(errors="replace").strip() or "another process"
        return f"{out} is in use: {who} trains there. Wait for its end, or pass another --out FOLDER"
    except OSError:
        return ""
    with suppress(OSError):  # a full disk: the name of the process is optional
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    return ""
