"""A cache of tokenised texts: files of token ids that all ranks read.

The cache is a folder, by default ``.ring-attn`` in the folder of the data, with two files for each version of the texts:

    <digest>.tokens    the ids of all documents one after the other, 1, 2 or 4 bytes each, little-endian. The digest is a hash
                       of ids, names and lengths, so datasets with equal contents share this file
    <key>.json         the index: the number of tokens of each document, and a hash of the index itself. The key is a hash of the
                       tokenizer's file, ``end``, ``column``, ``chat``, the chat template's files, and the names, sizes and
                       modification times of the files. So a second start finds the index without reading the texts. The index
                       also holds the ctime and the hash of each file. A file with another ctime, such as a copy with the old
                       name, size and modification time, is read again, and the index is used only if the hash is the same

Both files are written under temporary names in the folder and then renamed. The index is written after fsync and renaming of the
tokens, so the tokens of an index are always complete. If several processes start at once, one locks the folder and tokenises
while the others wait; the system releases the lock if that process dies. On Windows or a file system without locks each process
tokenises, and all write equal files. Files of older versions of the texts may be deleted when no run reads them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from ..files import check_regular, lock_file, open_file, read_bytes, read_json, sample
from . import row_files
from .chat import template_files
from .documents import Document, File, TokenizedDocuments, content_of, is_unchanged
from .encoding import CODES, Encoder
from .settings import DatasetSettings

VERSION, INDEX_VERSION = 1, 3
"""Format versions: of the tokens (part of the digest) and of the index (part of the key)."""

TOKENIZER = "tokenizer.json"


def tokenise(files: Sequence[File], settings: DatasetSettings) -> TokenizedDocuments:
    """Return the cached documents of text files or files of rows; if the cache lacks them, tokenise and store them first."""
    folder = Path(settings.folder) / ".ring-attn" if settings.cache is None else Path(settings.cache)
    tokenizer = _tokenizer_text(settings)
    index = folder / f"{_key(files, settings, tokenizer)}.json"
    try:
        kept = _read_index(index, files)
        if kept is None:
            folder.mkdir(parents=True, exist_ok=True)
            check_regular(folder / ".lock")
            with open(folder / ".lock", "ab") as lock:
                alone = lock_file(lock)
                for left in folder.glob(".writing-*") if alone else ():  # left by a killed process
                    left.unlink(missing_ok=True)
                kept = _read_index(index, files)
                if kept is None:
                    kept = _write(folder, index, files, Encoder(settings, tokenizer), settings)
    except OSError as error:
        raise ValueError(
            f"the tokens cannot be kept in {folder} ({error.strerror or error}): pass cache=, a folder that can be written and "
            "has room"
        ) from error
    return kept


def _tokenizer_text(settings: DatasetSettings) -> bytes | None:
    """Return the bytes of the tokenizer's file, one read for key and encoder, in case it changes; None without one."""
    if settings.tokenizer is None:
        return None
    path = Path(settings.tokenizer)
    try:
        return read_bytes(path / TOKENIZER if path.is_dir() else path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer={os.fspath(settings.tokenizer)!r} cannot be read ({error}): pass a {TOKENIZER} or its folder"
        ) from error


def _key(files: Sequence[File], settings: DatasetSettings, text: bytes | None) -> str:
    tokenizer = None if text is None else sha256(text).hexdigest()
    end = None if settings.end is None else int(settings.end)
    templates = None if settings.chat is None or settings.tokenizer is None else template_files(settings.tokenizer)
    file_states = [(file.name, file.size, file.modified) for file in files]
    return _hash([INDEX_VERSION, tokenizer, end, settings.column, settings.chat, templates, file_states])[:32]


def _hash(json_value: Any) -> str:
    return sha256(json.dumps(json_value).encode()).hexdigest()


def _read_index(index: Path, files: Sequence[File]) -> TokenizedDocuments | None:
    """Return the cached documents of ``files``; None if the cache is missing, is damaged or is made from other texts."""
    try:
        found = read_json(index)
        kept = found["index"]
        if _hash(kept) != found["hash"]:
            return None
        with open_file(_tokens(index.parent, kept)) as tokens:
            if sample(tokens) != kept["sample"]:
                return None
    except (FileNotFoundError, ValueError, KeyError):
        return None
    others = [(file, text) for file, (changed, text, _) in zip(files, kept["files"], strict=True) if file.changed != changed]
    if any(content_of(file) != text for file, text in others):
        return None
    if others:
        with suppress(OSError):  # not writable: the next start compares again
            held = [(file.changed, *rest) for file, (_, *rest) in zip(files, kept["files"], strict=True)]
            _write_index(index, kept | {"files": held})
    return _documents(index.parent, kept, files)


def _tokens(folder: Path, kept: dict[str, Any]) -> Path:
    return folder / f"{kept['digest']}.tokens"


def _names(files: Sequence[File], rows: Iterable[list[int] | None]) -> list[str]:
    return [
        name
        for file, each in zip(files, rows, strict=True)
        for name in ([file.name] if each is None else [f"{file.name}:{row}" for row in each])
    ]


def _documents(folder: Path, kept: dict[str, Any], files: Sequence[File]) -> TokenizedDocuments:
    width, offset, documents = kept["width"], 0, []
    size, where, dtype = width * sum(kept["tokens"]), str(_tokens(folder, kept)), f"<u{width}"
    for name, tokens in zip(_names(files, (rows for _, _, rows in kept["files"])), kept["tokens"], strict=True):
        documents.append(Document(name, where, size, dtype, offset, tokens, None, kept["sample"], kept["marked"]))
        offset += width * tokens
    return TokenizedDocuments(tuple(documents), kept["digest"], kept["vocab"])


def _write(folder: Path, index: Path, files: Sequence[File], encoder: Encoder, settings: DatasetSettings) -> TokenizedDocuments:
    vocab, marks = encoder.vocab, settings.marks_labels
    width = next(width for width in CODES if vocab <= 1 << (8 * width - marks) or width == max(CODES))
    end = b"" if settings.end is None else int(settings.end).to_bytes(width, "little")
    digest, counts, held = sha256(), [], []
    with _new_file(folder) as (out, path):
        with out:
            for file in files:
                text, found = sha256(), []
                for row, pieces in encoder.encode(file, width, text):
                    size = 0
                    for piece in chain(pieces, [end]):
                        out.write(piece)
                        digest.update(piece)
                        size += len(piece)
                    counts.append(size // width)
                    found.append(row)
                is_unchanged(file)
                held.append((file.changed, text.hexdigest(), found if row_files.is_row_file(file) else None))
            out.flush()
            os.fsync(out.fileno())
        names = _names(files, (rows for _, _, rows in held))
        digest.update(json.dumps([VERSION, width, vocab, names, counts]).encode())
        kept: dict[str, Any] = {"digest": digest.hexdigest(), "width": width, "vocab": vocab, "marked": marks, "tokens": counts}
        with open_file(path) as written:
            kept |= {"files": held, "sample": sample(written)}
        path.replace(_tokens(folder, kept))
    _write_index(index, kept)
    return _documents(folder, kept, files)


def _write_index(index: Path, kept: dict[str, Any]) -> None:
    with _new_file(index.parent) as (out, path):
        with out:
            out.write(json.dumps({"index": kept, "hash": _hash(kept)}).encode())
        path.replace(index)


@contextmanager
def _new_file(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a new file and its path, which the block closes and renames; the file is deleted if the block raises."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".writing-")
    try:
        out = os.fdopen(handle, "wb")
        os.chmod(name, 0o644)  # mkstemp makes it private, but other users' ranks may share the folder
        yield out, Path(name)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
