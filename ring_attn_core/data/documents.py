"""The documents of a folder: its files or the rows of its files, and where their tokens lie."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..files import Identity, check_regular, identity, open_file
from .settings import DatasetSettings

CHUNK = 1 << 20
"""Bytes of a file that are read at a time."""


class File(NamedTuple):
    """A file of a dataset's folder, with its ``stat`` fields from when it was found."""

    name: str
    """Path within the folder, with slashes."""
    path: str
    size: int
    modified: int
    """Time of the last write, in nanoseconds."""
    changed: int
    """Time of the last change of content or attributes (ctime), or on Windows of the creation, in nanoseconds."""


class Document(NamedTuple):
    """The file and the byte range of a document's tokens."""

    name: str
    path: str
    size: int
    dtype: str
    """numpy's name of the dtype and byte order, such as "<u2"."""
    offset: int
    """Offset of the first token in the file, in bytes."""
    tokens: int
    identity: Identity | None
    """Identity of the file; None for a file of the cache, because an equal file may replace it."""
    sample: str
    """Digest of blocks spread over the file."""
    marked: bool = False
    """True if the highest bit of an id says that its token has no label."""


class TokenizedDocuments(NamedTuple):
    """The documents of the files that match a dataset's pattern, in order of file name, then of row number."""

    documents: tuple[Document, ...]
    digest: str
    """Digest of the documents' names and tokens in order. For token arrays only sampled blocks of tokens are hashed."""
    vocab: int | None
    """One more than the largest possible id; None if unknown."""


def find_files(settings: DatasetSettings) -> list[File]:
    """Return the files that match the pattern, in order of name, without hidden files."""
    folder = Path(settings.folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"folder={os.fspath(settings.folder)!r} {what}: pass a folder with text files or .npy token arrays")
    _check_cache(folder, settings)
    files = []
    for path in folder.glob(settings.pattern):
        name = path.relative_to(folder).as_posix()
        if not _is_hidden(name.split("/")) and not path.is_dir():
            check_regular(path)
            now = identity_now(str(path))
            if now.size == 0:
                raise empty(str(path))
            files.append(File(name, str(path), *now[2:]))
    if not files:
        raise ValueError(
            f"no file in {settings.folder} fits pattern={settings.pattern!r} (hidden ones are left out): put text files in "
            "UTF-8, .jsonl, .parquet or .arrow files of rows, or .npy token arrays there, or pass another pattern"
        )
    return sorted(files)


def _is_hidden(parts: Iterable[str]) -> bool:
    return any(part.startswith(".") for part in parts)


def _check_cache(folder: Path, settings: DatasetSettings) -> None:
    if settings.cache is None:
        return
    cache, data = Path(settings.cache).resolve(), folder.resolve()
    if cache.is_relative_to(data) and not _is_hidden(cache.relative_to(data).parts):
        raise ValueError(
            f"cache={os.fspath(settings.cache)!r} lies in the folder of the data, where its files would be taken for documents: "
            "pass a folder elsewhere, or one whose name begins with a dot"
        )


def identity_now(path: str) -> Identity:
    try:
        return identity(path)
    except OSError as error:
        raise vanished_error(path, error) from error


@contextmanager
def open_found(path: str) -> Iterator[BinaryIO]:
    """Open a file that was found; an OSError while it is open becomes the ValueError that names it."""
    try:
        with open_file(path) as file:
            yield file
    except OSError as error:
        raise vanished_error(path, error) from error


def is_unchanged(file: File) -> None:
    if identity_now(file.path)[2:] != (file.size, file.modified, file.changed):
        raise ValueError(f"{file.path} changed while it was read: begin again when it is written")


def content_of(file: File) -> str:
    """Return the SHA-256 of a file in hex. Raise ValueError if the file cannot be read, or has changed since it was found."""
    content = sha256()
    update(content, file)
    is_unchanged(file)
    return content.hexdigest()


def update(content: Any, file: File) -> None:
    with open_found(file.path) as bytes_of_file:
        while chunk := bytes_of_file.read(CHUNK):
            content.update(chunk)


def vanished_error(path: str, error: OSError) -> ValueError:
    why = "has vanished" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror or error})"
    return ValueError(f"{path} {why}: restore it, or make the dataset anew without it")


def empty(path: str) -> ValueError:
    return ValueError(f"{path} is empty: a document has at least one token, so delete the file or pass another pattern")
