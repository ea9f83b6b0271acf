"""Readers of files that may be damaged, replaced or not regular. Each ValueError names the file, except in ``parse_json``.

Files are checked by ``stat``, opened without blocking, and checked again by ``fstat``.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

SAMPLES, BLOCK = 16, 4096
"""Number of blocks of a large file that ``sample`` reads by default, and the bytes of a block."""

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Identity(NamedTuple):
    """The fields of ``stat`` by which a replaced or modified file is recognized."""

    device: int
    inode: int
    size: int
    modified: int
    """Time of the last modification in nanoseconds; a program can set it back."""
    changed: int
    """Time of the last change of the inode in nanoseconds, also by rename, link and chmod; on Windows the time of creation."""


def identity(place: str | Path | int) -> Identity:
    """Return device, inode, size and times of a file, given by its path or an open file descriptor."""
    now = os.stat(place)
    return Identity(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for unbuffered reading; refuse folders, FIFOs (without blocking), sockets and devices."""
    check_regular(path)
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check_mode(path, os.fstat(number).st_mode)  # the file may have been replaced after check_regular
        return os.fdopen(number, "rb", buffering=0)
    except BaseException:
        os.close(number)
        raise


def check_regular(path: str | Path) -> None:
    """Raise ValueError, naming the path, if the file is not regular or ``stat`` fails. A missing file is accepted."""
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
    with open_file(path) as file:
        return file.read()


class OpenFile(Protocol):
    """An object with a file descriptor, such as an open file."""

    def fileno(self) -> int: ...


def read_at(file: OpenFile, offset: int, count: int) -> bytes:
    """Return ``count`` bytes from ``offset``, or fewer at the end. Threads and forks may share ``file``, except on Windows."""
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


def sample(file: OpenFile, samples: int = SAMPLES) -> str:
    """Return 32 hex digits of the SHA-256 over a file's size and evenly spread blocks, or over all bytes of a small file."""
    size = os.fstat(file.fileno()).st_size
    last = max(size - BLOCK, 0)
    apart = max(samples - 1, 1)
    starts = range(0, size, BLOCK) if size <= samples * BLOCK else [last * number // apart for number in range(samples)]
    digest = sha256(str(size).encode())
    for start in starts:
        digest.update(read_at(file, start, BLOCK))
    return digest.hexdigest()[:32]


def lock_file(file: OpenFile | int) -> bool:
    """Lock an open file, waiting for other processes. Return False on Windows and on file systems without locks."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text. Raise ValueError if it is not JSON or is nested too deeply for the parser."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its arrays and objects are nested too deeply") from error


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a UTF-8 JSON file; each error names the file."""
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
