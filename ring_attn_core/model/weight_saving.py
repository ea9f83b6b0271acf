"""Saving weights as a folder of safetensors files. A save that is killed leaves the previous or the new folder complete.

A save writes a temporary folder, calls fsync, and swaps both folders by renames, under a lock where the system has locks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from ..files import lock_file
from .weight_files import CONFIG, INDEX, REPLACED, SAVING, WEIGHTS, resolve, to_disk

LOCK = ".{}.lock"
"""Name of the lock file beside the folder ``{}``. A process locks this file while it saves the folder, and then deletes it."""

MAX_BYTES = 5 * 10**9
"""The most bytes of a file that holds several weights. The saving process holds all weights of a file in host memory."""

SAVED = "float32", "bfloat16", "float16", "float64"

Save = Callable[[dict[str, Any], Path, dict[str, str]], None]
"""The type of safetensors' ``save_file``: takes arrays by name, the path, and the header's metadata."""


def check_savable(name: str, dtype: str, valued: bool) -> None:
    if not valued:
        raise ValueError(f"{name} has no values yet: initialise or load the model before it is saved")
    if dtype not in SAVED:
        raise ValueError(f"{name} is {dtype}, and weights are saved in {', '.join(SAVED)}: convert the model to one of these")


@contextmanager
def replacing(folder: str | Path, files: Collection[str] = (CONFIG,)) -> Iterator[Path]:
    """Yield an empty folder that replaces ``folder`` when the block ends, and not after an error. After a kill ``current`` of
    weight_files.py finds one of both. If only the last fsync fails, OSError says so."""
    from safetensors import SafetensorError

    folder = resolve(folder)
    new, old = (folder.with_name(name.format(folder.name)) for name in (SAVING, REPLACED))
    _check_replaceable(folder, files)
    failed = "could not be saved, and what was there before is as it was"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            try:
                _settle(folder, old)
                _check_replaceable(folder, files)
                rmtree(new, ignore_errors=True)
                new.mkdir()
                yield new
                for path in (*new.iterdir(), new):
                    to_disk(path)
                if folder.exists():
                    folder.rename(old)
                new.rename(folder)
                failed = "is saved, but a power failure may undo it"
                to_disk(folder.parent)
                rmtree(old, ignore_errors=True)
            except BaseException:
                with suppress(OSError):  # if this fails, ``current`` finds the old folder
                    _settle(folder, old)
                rmtree(new, ignore_errors=True)
                raise
    except (OSError, SafetensorError) as error:
        raise OSError(f"{folder} {failed}: {error}") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder against saves of other processes; do nothing on Windows and on file systems without locks."""
    if sys.platform == "win32":
        yield
        return
    path = folder.with_name(LOCK.format(folder.name))
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            lock_file(number)
            if path.exists() and os.path.samestat(os.stat(path), os.fstat(number)):  # else the process before has deleted it
                break
            os.close(number)
        except BaseException:
            os.close(number)
            raise
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(number)


def write(folder: Path, weights: Iterable[tuple[str, Any]], save_file: Save) -> None:
    """Write the weights in files of at most MAX_BYTES or one weight; hold those of one file in memory, and the next."""
    files: list[list[str]] = []
    part: dict[str, Any] = {}
    total = 0
    temporary = lambda number: folder / f"{number}.part"

    def finish() -> None:
        save_file(part, temporary(len(files)), {"format": "pt"})  # transformers requires it; it does not affect the layout
        temporary(len(files)).chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private
        files.append(list(part))
        part.clear()

    for name, x in weights:
        if part and sum(each.nbytes for each in part.values()) + x.nbytes > MAX_BYTES:
            finish()
        part[name] = x
        total += x.nbytes
    finish()
    if len(files) == 1:
        temporary(0).rename(folder / WEIGHTS)
        return
    holder: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        temporary(number).rename(folder / file)
        holder |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": holder}, indent=2))


def _check_replaceable(folder: Path, files: Collection[str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: weights are saved as a folder")
    ours = lambda path: path.name in (CONFIG, INDEX, WEIGHTS, *files) or path.match("model-?????-of-?????.safetensors")
    kept = [path.name for path in folder.glob("*") if not ours(path)]
    if kept:
        raise ValueError(
            f"{folder} holds {', '.join(sorted(kept)[:8])}, which saving would delete, for it replaces the whole folder: save to "
            "a folder that does not exist yet, or holds weights only"
        )


def _settle(folder: Path, old: Path) -> None:
    """Clean up after an interrupted save: delete the previous folder, ``old``, if ``folder`` exists, else restore it."""
    if not old.exists():
        return
    if folder.exists():
        rmtree(old, ignore_errors=True)
    else:
        old.rename(folder)
