"""Paths without a regular file, on which a careless reader hangs, reads forever or fails with another error."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KINDS = {
    "FIFO": "is a FIFO",
    "socket": "is a socket",
    "device": "is a device",
    "folder": "is a folder",
    "loop": "Too many levels of symbolic links",
}
"""The kinds of file at a path, and the text of the error that each must raise."""

DEEP = "[" * 100_000 + "]" * 100_000
"""JSON nested too deeply for Python's parser."""


def put(kind: str, path: Path) -> None:
    """Replace the file at the path, if any, with one of this kind."""
    with suppress(FileNotFoundError):
        path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has at most about 100 characters
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)


@contextmanager
def in_time(seconds: int = 20) -> Iterator[None]:
    """Raise TimeoutError if the body does not return."""

    def late(*_: object) -> None:
        raise TimeoutError("it does not return")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
