"""The lock of a run's folder: a second run would overwrite the checkpoints, log and weights of the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ring_attn_core.model.folder_lock import LOCK, FolderLock

from .config import Config


@contextmanager
def hold(config: Config, first: bool = True, share: Callable[[str], str] = str) -> Iterator[None]:
    """Lock the folder of a run until the block ends.
    ``first``: True in the one process that locks. ``share``: returns the first process's text in each process. The system
    releases the lock of a killed process; on a file system without locks nothing keeps other runs out."""
    lock, objection, out = None, "", Path(config.out)
    if first:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(out, "trains there", "pass another --out FOLDER")
        except ValueError as error:
            objection = str(error)
        except OSError as error:
            objection = f"{out / LOCK} cannot be written ({error.strerror}): pass another --out FOLDER"
    try:
        if objection := share(objection):
            raise ValueError(objection)
        yield
    finally:
        if lock is not None:
            lock.forget()
