"""The folder of a run's checkpoints: find complete checkpoints, complete a new one in the background, and delete old ones.

A save writes into ``.step-000000100.<random>.saving`` (``CheckpointFolder.begin``). ``commit`` calls fsync on this folder,
renames it to ``step-000000100``, and writes ``run.json`` into it. Then it calls fsync on this file, the renamed folder and its
parent. ``run.json`` marks the checkpoint as complete; a caller may name other files as marks. Readers ignore a checkpoint without
a mark, and the next save deletes it. Renames are not atomic on an object store. Even there, a process killed during a rename
leaves no checkpoint that looks complete.
"""

from __future__ import annotations

import errno
import json
import re
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import file_digest
from pathlib import Path
from secrets import token_hex
from shutil import copytree, rmtree
from typing import Any

from .folder_lock import FolderLock, lock
from .progress import check_keep, check_next
from .weight_files import to_disk

RUN = "run.json"
"""The file that completes a checkpoint. It holds the progress of the run, and the sizes and digests of saved files."""

LAG = 10.0
"""Seconds to wait for a file that another machine has written, because NFS may show it late."""

NO_FSYNC = errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EPERM, errno.EACCES, errno.EISDIR
"""Error codes of fsync on a folder which mean that the file system does not support fsync on folders."""


class CheckpointFolder:
    """Checkpoints in ``path``. ``name``: format such as "step-{:09}". ``marks``: one of these files completes a checkpoint."""

    def __init__(self, path: Path, name: str, marks: tuple[str, ...] = (RUN,)) -> None:
        self.path, self._name, self._marks = path, name, marks
        self._lock: FolderLock | None = None

    def where(self, step: int) -> Path:
        return self.path / self._name.format(step)

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in ascending order."""
        self._check_path()
        return sorted(step for step, path in self._named() if self._is_complete(path))

    def holds(self, step: int | None) -> bool:
        """Return whether the step has a complete checkpoint; wait up to LAG seconds for it. Return True if ``step`` is None."""
        return step is None or self._is_complete(self.where(step)) or wait_for(self.where(step) / RUN)

    def begin(self, step: int) -> Path:
        """Lock the folder, delete incomplete folders that killed runs left, and return a new empty folder for a checkpoint."""
        self._check_path()
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = lock(self.path)
        self._lock.check()
        check_next(step, self.steps(), self.path)
        for left in self.path.glob(f".{self._name.split('{')[0]}*"):
            rmtree(left, ignore_errors=True)
        for _, path in self._named():
            if not self._is_complete(path) and not wait_for(path / RUN):
                rmtree(path, ignore_errors=True)
        new = self.path / f".{self.where(step).name}.{token_hex(8)}.saving"
        new.mkdir()
        return new

    def commit(self, new: Path, step: int, run: dict[str, Any]) -> None:
        """Rename ``new``, made by ``begin``, or copy its files if renaming is not possible; then write ``run`` into run.json."""
        done = self.where(step)
        if self._lock is not None:
            self._lock.check(OSError)
        if self._is_complete(done):
            raise FileExistsError(f"{done} exists already: another run has written it")
        rmtree(done, ignore_errors=True)
        _names_to_disk(new)
        try:
            new.rename(done)
        except OSError:
            copytree(new, done, dirs_exist_ok=True)
            for file in _files(done):
                to_disk(file)
            rmtree(new, ignore_errors=True)
        _write_whole(done / RUN, json.dumps(run, indent=2))
        _names_to_disk(done)
        _names_to_disk(self.path)

    def delete_old(self, keep: int) -> str:
        """Delete all but the newest ``keep`` checkpoints. Return one message for all failures, or "" without failures."""
        objections = []
        for step in self.steps()[:-keep]:
            path, going = self.where(step), self.path / f".{self.where(step).name}.deleted"
            try:
                try:
                    path.rename(going)
                except OSError:
                    for mark in self._marks:
                        (path / mark).unlink(missing_ok=True)
                    going = path
                rmtree(going)
            except OSError as error:
                objections.append(f"{path} could not be deleted: {error}")
        return "; ".join(objections)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.forget()
            self._lock = None

    def _check_path(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: checkpoints are saved in a folder")
        if self.path.name.startswith(self._name.partition("{")[0]) and self._is_complete(self.path):
            raise ValueError(f"{self.path} is a checkpoint: pass the folder that holds it, {self.path.parent}")

    def _named(self) -> list[tuple[int, Path]]:
        """Return the paths named like checkpoints, complete or not, each with its step."""
        before = self._name.split("{")[0]
        found = ((re.fullmatch(rf"{re.escape(before)}(\d+)", path.name), path) for path in self.path.glob(f"{before}*"))
        steps = ((int(match[1]), path) for match, path in found if match and len(match[1]) < 20)
        return [(step, path) for step, path in steps if path.name == self.where(step).name]

    def _is_complete(self, path: Path) -> bool:
        return any((path / mark).is_file() for mark in self._marks)


class BackgroundSaves:
    """The part of ``Checkpoints`` without framework. ``_failed(step, error)``: returns the error to raise after a failed save."""

    _failed: Any

    def __init__(self, folder: str | Path, keep: int, name: str, marks: tuple[str, ...] = (RUN,)) -> None:
        check_keep(keep)
        self.folder, self.keep = Path(folder).resolve(), keep
        self._folder = CheckpointFolder(self.folder, name, marks)
        self._pending: tuple[int, Future[None]] | None = None
        self._undeleted, self._is_closed = "", False

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"these Checkpoints of {self.folder} are closed: make new ones to save")

    def _start(self, step: int, write: Callable[..., None], *arguments: object) -> None:
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending = step, thread.submit(write, *arguments)
        thread.shutdown(wait=False)  # the thread ends after the save

    def _commit(self, new: Path, step: int, run: dict[str, Any]) -> None:
        self._folder.commit(new, step, run)
        self._undeleted = self._folder.delete_old(self.keep)

    def wait(self) -> None:
        """Wait for the save in progress, if any. Raise OSError if it has failed; earlier checkpoints stay complete.

        Warn if the save could not delete old checkpoints.
        """
        if self._pending is not None:
            (step, saving), self._pending = self._pending, None
            try:
                saving.result()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                raise self._failed(step, error) from error
        if self._undeleted:
            words, self._undeleted = self._undeleted, ""
            warnings.warn(f"{words}. The newest checkpoint is whole", stacklevel=2)

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in ascending order."""
        return self._folder.steps()

    def close(self) -> None:
        """Wait for the save in progress, as ``wait`` does, and unlock the folder for other runs. Then ``save`` is refused.

        Call it at the end of the run.
        """
        try:
            self.wait()
        finally:
            self._is_closed = True
            self._folder.release()


def wait_for(path: Path, patience: float | None = None) -> bool:
    """Return whether ``path`` exists; wait up to ``patience`` seconds (None: LAG) for it, because NFS may show it late."""
    deadline, nap = time.monotonic() + (LAG if patience is None else patience), 0.01
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(nap)
        nap = min(2 * nap, 0.5)
    return True


def digests(folder: Path, files: Iterable[str] | None = None) -> dict[str, list[Any]]:
    """Map each name in ``files`` (None: all files) to [size in bytes, SHA-256]. Names are paths relative to ``folder``."""
    names = [file.relative_to(folder).as_posix() for file in _files(folder)] if files is None else files
    return {name: [(folder / name).stat().st_size, _sha256(folder / name)] for name in names}


def check_files(where: Path, run: dict[str, Any], suffix: str | None, part: int = 0, parts: int = 1) -> None:
    """Raise ValueError if a file is missing, unexpected (by ``suffix``) or changed. All sizes are checked, and digests of every
    ``parts``-th file from ``part`` on, so that ranks share the reading. Old checkpoints have no digests."""
    saved = run.get("files")
    if saved is None:
        return
    remedy = f"delete {where} to resume from the checkpoint before, or copy it again"
    if not isinstance(saved, dict) or not all(_is_entry(name, entry) for name, entry in saved.items()):
        raise ValueError(f"{where / RUN} must give size and SHA-256 of every file under files: {remedy}")
    for name in saved:
        if not wait_for(where / name):
            raise ValueError(f"{where / name} is missing: {remedy}")
    theirs = [] if suffix is None else [file for file in _files(where) if file.name.endswith(suffix)]
    extra = [file for file in theirs if file.relative_to(where).as_posix() not in saved]
    if extra:
        raise ValueError(f"{extra[0]} is not a file of this checkpoint: {remedy}")
    for number, (name, (size, digest)) in enumerate(sorted(saved.items())):
        found = (where / name).stat().st_size
        if found != size:
            raise ValueError(f"{where / name} of {found} bytes is truncated or damaged, it had {size}: {remedy}")
        if number % parts == part and _sha256(where / name) != digest:
            raise ValueError(f"{where / name} is damaged, its SHA-256 is not that of the file when it was saved: {remedy}")


def _is_entry(name: str, entry: Any) -> bool:
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    return inside and isinstance(entry, list) and [type(x) for x in entry] == [int, str]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _write_whole(file: Path, text: str) -> None:
    """Write ``text`` to ``file`` atomically: write a temporary file, fsync it, rename it. If renaming fails, write in place."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    to_disk(new)
    try:
        new.replace(file)
    except OSError:
        file.write_text(text)
        to_disk(file)
        new.unlink(missing_ok=True)


def _names_to_disk(folder: Path) -> None:
    """Call fsync on a folder, if the file system supports that, so that its file names survive a loss of power."""
    try:
        to_disk(folder)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise
