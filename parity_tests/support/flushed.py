"""Checks for a loss of power: which files were flushed to the disk, and which were not when their folder got its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest


@contextmanager
def unflushed() -> Iterator[list[str]]:
    """Yield a list of the paths that were not on the disk, in their current state, when their folder was renamed; Linux only."""
    flushed: dict[Path, tuple[int, int]] = {}
    lost: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def now(path: Path) -> tuple[int, int]:
        return path.stat().st_size, path.stat().st_mtime_ns

    def noted(number: int) -> None:
        fsync(number)
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        flushed[path] = now(path)

    def renamed(folder: Path, to: Path) -> Path:
        if folder.is_dir():
            lost.extend(str(path) for path in (*folder.rglob("*"), folder) if flushed.get(path) != now(path))
        flushed.update({to / path.relative_to(folder): known for path, known in flushed.items() if folder in path.parents})
        return rename(folder, to)

    with patch.object(os, "fsync", noted), patch.object(Path, "rename", renamed):
        yield lost


class Disk:
    """A record of all fsync calls, from which the state of files after a loss of power follows; Linux only."""

    def __init__(self) -> None:
        self._flushed: dict[int, object] = {}

    def holds(self, path: Path) -> bool:
        """Return True if the file's current content was flushed."""
        return self._flushed.get(path.stat().st_ino) == _state(path)

    def names(self, path: Path) -> bool:
        """Return True if the parent folder was flushed after the file or folder got its name."""
        names = self._flushed.get(path.parent.stat().st_ino)
        return isinstance(names, set) and (path.name, path.stat().st_ino) in names

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> Disk:
        """Record every fsync from now on."""
        fsync = os.fsync

        def noted(number: int) -> None:
            fsync(number)
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            self._flushed[path.stat().st_ino] = _state(path)

        monkeypatch.setattr(os, "fsync", noted)
        return self


def _state(path: Path) -> object:
    if path.is_dir():
        return {(each.name, each.stat().st_ino) for each in path.iterdir()}
    return path.stat().st_size, path.stat().st_mtime_ns
