"""One run in a folder at a time: a second one would write checkpoints, log and weights over those of the first."""

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
    """Keep the folder of a run for this run until the block ends; ValueError, in all its processes, where another run has it.

    ``first``: whether this process, of all of the run, is the one that locks; ``of_first`` tells all what the first one says. The
    system lifts the lock when its process ends, however that ends; the file stays, and means nothing by itself. On a file system
    without locks, as some of a network are, nobody is kept out.
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
    """Lock the file, and say in it who has; what is wrong where another process had locked it before."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        who = file.read().strip() or "another process"
        return f"{out} is in use: {who} trains there. Wait for its end, or pass another --out FOLDER"
    except OSError:
        return ""
    with suppress(OSError):  # a full disk: who it is need not be known
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return ""
