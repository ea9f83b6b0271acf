"""The lock of a run's folder, by ``flock``: a second run would overwrite the checkpoints, log and weights of the first."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .config import Config

LOCK = ".lock"


@contextmanager
def held(config: Config, first: bool = True, of_first: Callable[[str], str] = str) -> Iterator[None]:
    """Lock the folder of a run until the block ends. Raise ValueError in all its processes if another run has it.

    ``first``: True in the one process that locks. ``of_first``: broadcasts its message to all processes. The system releases the
    lock when the process ends, even if it is killed; the file stays and has no meaning by itself. A file system without locks,
    such as some network ones, excludes no other run.
    """
    if not first:
        _raise(of_first(""))
        yield
        return
    path = Path(config.out, LOCK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        _raise(of_first(f"{path} cannot be written ({error.strerror}): pass another --out FOLDER"))
        raise
    with file:
        _raise(of_first(_objection(file, config.out)))
        yield


def _raise(objection: str) -> None:
    if objection:
        raise ValueError(objection)


def _objection(file: IO[str], out: str) -> str:
    """Lock the file and write the process and host into it. Return an objection if another process holds the lock, else ""."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        who = file.read().strip() or "another process"
        return f"{out} is in use: {who} trains there. Wait for its end, or pass another --out FOLDER"
    except OSError:
        return ""
    with suppress(OSError):  # a full disk: the name of the process is optional
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return ""
