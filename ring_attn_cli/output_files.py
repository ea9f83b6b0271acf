"""The check of a file that a command will write, made before the command computes anything."""

from __future__ import annotations

from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise ValueError if ``path`` cannot be opened for appending. Remove the file if it did not exist before."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for {path.name}: make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it")
    there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): name another file") from error
    if not there:
        path.resolve().unlink()
