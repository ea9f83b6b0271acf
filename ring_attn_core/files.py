"""Reading files that may be damaged, replaced or no files at all: what is wrong is a ValueError that names the file."""

from __future__ import annotations

import json
import os
import stat
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

SAMPLES, BLOCK = 16, 4096
"""How many blocks of a large file ``sample`` reads by itself, and how many bytes each has."""

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Identity(NamedTuple):
    """What tells whether a file is still the one that was opened, with unchanged content."""

    device: int
    inode: int
    size: int
    modified: int
    """In nanoseconds; a program can set it back."""
    changed: int
    """In nanoseconds, by the clock of the file system: no program can set it back, but a rename, link or chmod moves it too."""


def identity(place: str | Path | int) -> Identity:
    """Return the identity of the file at a path or of an open file's number."""
    now = os.stat(place)
    return Identity(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered, without ever waiting for a writer of a FIFO.

    Raises ValueError, naming the path, for a folder, a FIFO, a socket, a device and a loop of symbolic links, and OSError as
    ``open`` does where the file is missing or may not be read.
    """
    check_regular(path)
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check_mode(path, os.fstat(number).st_mode)  # it may have been replaced since
        return os.fdopen(number, "rb", buffering=0)
    except BaseException:
        os.close(number)
        raise


def check_regular(path: str | Path) -> None:
    """Raise ValueError, naming the path, if it is there and is no regular file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ValueError(f"{os.fspath(path)} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    _check_mode(path, mode)


def _check_mode(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise ValueError(f"{os.fspath(path)} is {what}: put a regular file there")


def read_bytes(path: str | Path) -> bytes:
    """Return all bytes of a regular file; the errors are those of ``open_file``."""
    with open_file(path) as file:
        return file.read()


class Open(Protocol):
    """An open file."""

    def fileno(self) -> int:
        """Return its number."""
        ...


def read_at(file: Open, offset: int, count: int) -> bytes:
    """Return ``count`` bytes from ``offset``, fewer only where the file ends; threads and forks may share ``file``."""
    parts = []
    while count > 0:
        if hasattr(os, "pread"):
            part = os.pread(file.fileno(), count, offset)
        else:  # Windows
            os.lseek(file.fileno(), offset, os.SEEK_SET)
            part = os.read(file.fileno(), count)
        if not part:
            break
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def sample(file: Open, samples: int = SAMPLES) -> str:
    """Return a digest of a file's size and of ``samples`` blocks, evenly spread from its first to its last byte.

    Of a file that has no more bytes than these blocks it is a digest of the whole content.
    """
    size = os.fstat(file.fileno()).st_size
    last = max(size - BLOCK, 0)
    starts = range(0, size, BLOCK) if size <= samples * BLOCK else [last * number // (samples - 1) for number in range(samples)]
    digest = sha256(str(size).encode())
    for start in starts:
        digest.update(read_at(file, start, BLOCK))
    return digest.hexdigest()[:32]


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds; ValueError for what is no JSON, and for arrays and objects nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its arrays and objects are nested too deeply") from error


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file, in UTF-8.

    Raises ValueError that names the file where it is missing, is no regular file, or holds no JSON object.
    """
    try:
        found = parse_json(read_bytes(path).decode("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        words = str(error) if str(error).startswith(os.fspath(path)) else f"{path} cannot be read as JSON: {error}"
        raise ValueError(words) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(found).__name__}")
    return found
