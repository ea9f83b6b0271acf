"""Texts, tokenised once into a file that ranks map into memory.

The cache is a folder, by itself ``.ring-attn`` in the folder of the data, with two files for each state of the texts:

    <digest>.tokens    the ids of all documents one after the other, 1, 2 or 4 bytes each, little-endian; the digest is of these,
                       of the names and of the lengths, so equal contents are one file
    <key>.json         where each document lies in it. The key is of the tokenizer's file, ``end``, and the names, sizes and
                       times of the texts, so that a second start reads no text

Both are written beside their place and then renamed, the index last: whoever finds it finds everything. Of several processes that
start at once, one tokenises while the others wait for its lock, which ends with it however it ends. Where the file system has no
locks, each tokenises and all write the same. What an older state of the texts has left may be deleted when no run reads it.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from .documents import Document, Documents, File, unchanged, vanished
from .settings import BYTES, Settings

CHUNK = 1 << 20
VERSION = 1
"""Of what the files hold: part of the key."""

CODES = {1: "B", 2: "H", 4: "I"}


def tokenised(files: Sequence[File], settings: Settings) -> Documents:
    """The documents of these texts, from the cache, or tokenised into it. ValueError for what is no text in UTF-8."""
    folder = Path(settings.folder) / ".ring-attn" if settings.cache is None else Path(settings.cache)
    index = folder / f"{_key(files, settings)}.json"
    try:
        kept = _kept(index, files)
        if kept is None:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):
                kept = _kept(index, files)
                if kept is None:
                    kept = _written(folder, index, files, settings)
    except OSError as error:
        raise ValueError(
            f"the tokens cannot be kept in {folder} ({error.strerror or error}): pass cache=, a folder that can be written and "
            "has room"
        ) from error
    return kept


def _key(files: Sequence[File], settings: Settings) -> str:
    tokenizer = None
    if settings.tokenizer is not None:
        try:
            tokenizer = sha256(Path(settings.tokenizer).read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"tokenizer={os.fspath(settings.tokenizer)!r} cannot be read: pass a tokenizer.json") from error
    end = None if settings.end is None else int(settings.end)
    what = [VERSION, tokenizer, end, *((file.name, file.size, file.modified) for file in files)]
    return sha256(json.dumps(what).encode()).hexdigest()[:32]


def _kept(index: Path, files: Sequence[File]) -> Documents | None:
    """What the cache holds of these files; None where it is not all there."""
    try:
        kept = json.loads(index.read_text("utf-8"))
        path = index.parent / f"{kept['digest']}.tokens"
        width, counts, size = kept["width"], kept["tokens"], path.stat().st_size
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if size != width * sum(counts) or len(counts) != len(files):
        return None
    return _described(path, kept, files)


def _described(path: Path, kept: dict[str, Any], files: Sequence[File]) -> Documents:
    width, offset, documents = kept["width"], 0, []
    size = width * sum(kept["tokens"])
    for file, tokens in zip(files, kept["tokens"], strict=True):
        documents.append(Document(file.name, str(path), size, f"<u{width}", offset, tokens))
        offset += width * tokens
    return Documents(tuple(documents), kept["digest"], kept["vocab"])


def _written(folder: Path, index: Path, files: Sequence[File], settings: Settings) -> Documents:
    encode, vocab = _encoder(settings)
    width = 1 if vocab <= 1 << 8 else 2 if vocab <= 1 << 16 else 4
    end = b"" if settings.end is None else int(settings.end).to_bytes(width, "little")
    digest, counts = sha256(), []
    handle, path = tempfile.mkstemp(dir=folder, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as out:
            for file in files:
                size = 0
                for piece in chain(_checked(encode(file, width), file), [end]):
                    out.write(piece)
                    digest.update(piece)
                    size += len(piece)
                unchanged(file)
                counts.append(size // width)
            out.flush()
            os.fsync(out.fileno())
        digest.update(json.dumps([VERSION, width, vocab, [file.name for file in files], counts]).encode())
        kept = {"digest": digest.hexdigest(), "width": width, "vocab": vocab, "tokens": counts}
        tokens = folder / f"{kept['digest']}.tokens"
        os.chmod(path, 0o644)  # mkstemp lets nobody else read it, and other users' ranks may share the folder
        os.replace(path, tokens)
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
    _write_index(index, json.dumps(kept))
    return _described(tokens, kept, files)


def _write_index(index: Path, text: str) -> None:
    handle, path = tempfile.mkstemp(dir=index.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(path, 0o644)
        os.replace(path, index)
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise


def _checked(pieces: Iterable[bytes], file: File) -> Iterator[bytes]:
    """The same pieces; ValueError where they hold nothing."""
    empty = True
    for piece in pieces:
        empty = empty and not piece
        yield piece
    if empty:
        raise ValueError(f"{file.path} makes no tokens: a document has at least one, so delete the file or pass another pattern")


Encode = Callable[[File, int], Iterable[bytes]]


def _encoder(settings: Settings) -> tuple[Encode, int]:
    """What makes ids of a file, given in how many bytes each, and how many ids there are."""
    end = -1 if settings.end is None else int(settings.end)
    if settings.tokenizer is None:
        return _bytes, max(BYTES, end + 1)
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found]  # optional
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("tokenizer= needs tokenizers: run pip install tokenizers", name="tokenizers") from missing
    try:
        tokenizer = Tokenizer.from_file(os.fspath(settings.tokenizer))
    except Exception as error:  # whatever its Rust raises
        raise ValueError(f"tokenizer={os.fspath(settings.tokenizer)!r} is no tokenizer.json of tokenizers: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(file: File, width: int) -> Iterator[bytes]:
        text = b"".join(_utf8(file)).decode("utf-8")
        ids = array(CODES[width], tokenizer.encode(text, add_special_tokens=False).ids)
        if sys.byteorder == "big":
            ids.byteswap()
        yield ids.tobytes()

    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)  # ids may have gaps
    return encode, max(largest, end) + 1


def _bytes(file: File, width: int) -> Iterator[bytes]:
    """The bytes of a text as ids."""
    for chunk in _utf8(file):
        ids = bytearray(width * len(chunk))
        ids[::width] = chunk
        yield bytes(ids)


def _utf8(file: File) -> Iterator[bytes]:
    """A file in chunks; ValueError where it is no text in UTF-8."""
    decoder, seen = codecs.getincrementaldecoder("utf-8")(), 0
    with _opened(file) as opened:
        while chunk := opened.read(CHUNK):
            zero = chunk.find(b"\0")
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                raise _binary(file, f"no UTF-8 near byte {seen + error.start}") from error
            if zero >= 0:
                raise _binary(file, f"byte {seen + zero} is 0")
            seen += len(chunk)
            yield chunk
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _binary(file, "it ends within a letter of UTF-8") from error


def _opened(file: File) -> BinaryIO:
    try:
        return open(file.path, "rb")
    except OSError as error:
        raise vanished(file.path, error) from error


def _binary(file: File, why: str) -> ValueError:
    return ValueError(
        f"{file.path} is no text ({why}): convert it to UTF-8, save token ids with numpy.save as .npy, or pass a pattern that "
        "leaves it out, such as pattern='**/*.txt'"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process tokenises into the folder. The system lifts the lock of a process that ends."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with open(folder / ".lock", "ab") as lock:
        with suppress(OSError):  # a file system may have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
