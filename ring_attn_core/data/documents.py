"""Where the documents of a folder are: which files it has, and what is known of the tokens in each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..files import Identity, check_regular, identity
from .settings import Settings


class File(NamedTuple):
    """A file of the folder as it was found."""

    name: str
    """Its path within the folder, with slashes."""
    path: str
    size: int
    modified: int
    """In nanoseconds."""
    changed: int
    """When its content or its attributes last changed, which no program sets back; in nanoseconds."""


class Document(NamedTuple):
    """Where the tokens of a document lie."""

    name: str
    path: str
    """Of a file that holds them, little-endian or as ``dtype`` says."""
    size: int
    """How many bytes that file has."""
    dtype: str
    """In numpy's words, such as "<u2"."""
    offset: int
    """Where in the file they begin, in bytes."""
    tokens: int
    identity: Identity | None
    """That of the file; None where its name says what it holds, so that an equal one may take its place."""
    sample: str
    """A digest of blocks all over the file."""


class Documents(NamedTuple):
    """All documents of a folder, in the order of their names."""

    documents: tuple[Document, ...]
    digest: str
    """Changes where names, tokens or their order do."""
    vocab: int | None
    """One more than the largest id that can occur; None where nobody knows."""
    former: str | None = None
    """The digest that an older release made of them, where it is another."""


def found(settings: Settings) -> list[File]:
    """The files that the pattern names, hidden ones left out, in the order of their names; ValueError where there are none."""
    folder = Path(settings.folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"folder={os.fspath(settings.folder)!r} {what}: pass a folder with text files or .npy token arrays")
    _check_cache(folder, settings)
    files = []
    for path in folder.glob(settings.pattern):
        name = path.relative_to(folder).as_posix()
        if not _hidden(name.split("/")) and not path.is_dir():
            check_regular(path)
            try:
                now = identity(path)
            except OSError as error:
                raise vanished(str(path), error) from error
            if now.size == 0:
                raise empty(str(path))
            files.append(File(name, str(path), *now[2:]))
    if not files:
        raise ValueError(
            f"no file in {settings.folder} fits pattern={settings.pattern!r} (hidden ones are left out): put text files in UTF-8 "
            "or .npy token arrays there, or pass another pattern"
        )
    return sorted(files)


def _hidden(parts: Iterable[str]) -> bool:
    return any(part.startswith(".") for part in parts)


def _check_cache(folder: Path, settings: Settings) -> None:
    """ValueError for a cache whose files would be documents at the next start."""
    if settings.cache is None:
        return
    cache, data = Path(settings.cache).resolve(), folder.resolve()
    if cache.is_relative_to(data) and not _hidden(cache.relative_to(data).parts):
        raise ValueError(
            f"cache={os.fspath(settings.cache)!r} lies in the folder of the data, where its files would be taken for documents: "
            "pass a folder elsewhere, or one whose name begins with a dot"
        )


def unchanged(file: File) -> None:
    """ValueError where a file is no longer as it was found."""
    try:
        now = identity(file.path)
    except OSError as error:
        raise vanished(file.path, error) from error
    if now[2:] != (file.size, file.modified, file.changed):
        raise ValueError(f"{file.path} changed while it was read: begin again when it is written")


def vanished(path: str, error: OSError) -> ValueError:
    """What is raised where a file cannot be read."""
    why = "has vanished" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror or error})"
    return ValueError(f"{path} {why}: restore it, or make the dataset anew without it")


def empty(path: str) -> ValueError:
    """What is raised for a file without tokens."""
    return ValueError(f"{path} is empty: a document has at least one token, so delete the file or pass another pattern")
