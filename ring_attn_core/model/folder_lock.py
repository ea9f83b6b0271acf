"""A lock on a folder of checkpoints or of a run, so that only one run at a time writes there.

The system's lock (flock) on the file ``.lock`` ends with the process that holds it, even if that process is killed. Some file
systems have no locks, or separate locks on each machine. So each run that locks the folder also writes a random token into the
file, over the token of the run before. A run that finds another run's token has lost the folder and stops saving.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from secrets import token_hex
from weakref import WeakValueDictionary, finalize

LOCK = ".lock"


class FolderLock:
    """A lock on a folder until ``forget`` or the object's deletion. ``doing`` and ``remedy`` end the refusal of another run."""

    def __init__(
        self, folder: Path, doing: str = "saves its checkpoints there", remedy: str = "give this run another folder"
    ) -> None:
        self._folder, self._path = folder, folder / LOCK
        self._token = token_hex(16)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._close = finalize(self, os.close, file)
        _lock(file, f"{folder} is in use: {{}} {doing}. Wait for its end, or {remedy}")
        os.ftruncate(file, 0)
        os.write(file, f"{self._token} process {os.getpid()} on {socket.gethostname()}".encode())

    @property
    def is_held(self) -> bool:
        return self._close.alive

    def forget(self) -> None:
        """Close the file. A forked process must: the lock lasts until all duplicates of the descriptor are closed."""
        self._close()

    def check(self, kind: type[Exception] = ValueError) -> None:
        """Raise an exception of type ``kind`` if the lock file has another run's token: flock did not keep that run out."""
        try:
            token, _, who = self._path.read_text(errors="replace").partition(" ")
        except OSError:
            return
        if len(token) == len(self._token) and token != self._token:
            raise kind(f"{self._folder} was taken over by another run, {who}: end one of the two, or give it another folder")


_held: WeakValueDictionary[tuple[int, Path], FolderLock] = WeakValueDictionary()
"""The locks by (process id, folder). The id is part of the key, because a forked process does not hold its parent's locks."""


def _forget() -> None:
    for lock in [*_held.values()]:
        lock.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)


def lock(folder: Path) -> FolderLock:
    """Lock the folder and return the lock. Raise ValueError if it is already locked, as far as this process or flock knows."""
    key = os.getpid(), folder
    lock = _held.get(key)
    if lock is not None and lock.is_held:
        raise ValueError(
            f"{folder} is in use: other Checkpoints of this process save there. close() them first, or give this run another "
            "folder"
        )
    lock = _held[key] = FolderLock(folder)
    return lock


def _lock(file: int, refusal: str) -> None:
    if sys.platform == "win32":
        return
    import fcntl  # not on Windows

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        who = os.pread(file, 1000, 0).decode(errors="replace").partition(" ")[2] or "another process"
        raise ValueError(refusal.format(who)) from error
    except OSError:  # a file system without locks: the token remains
        return
