"""A cache of tokenised texts: each text is tokenised once into a file from which all ranks read.

The cache is a folder, by default ``.ring-attn`` in the folder of the data, with two files for each version of the texts:

    <digest>.tokens    the ids of all documents one after the other, 1, 2 or 4 bytes each, little-endian; the digest is the
                       hash of ids, names and lengths, so equal contents share a file
    <key>.json         the index: where each document lies in it. The key is a hash of the tokenizer's file, ``end``, and the
                       names, sizes and times of the texts, so a second start reads no text. If the time of change of a text
                       differs from the index (it was copied, or its size and time were set back), the text is read and compared

Both are written to a temporary file in the folder and renamed: first the tokens, after an fsync, then the index. So the tokens of
an index are always complete. If several processes start at once, one locks the folder and tokenises while the others wait; the
system releases the lock if that process dies. On a file system without locks each process tokenises, and all write the same.
Files of older versions of the texts may be deleted when no run reads them.
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

from ..files import check_regular, identity, open_file, read_bytes, read_json, sample
from .documents import Document, Documents, File, unchanged, vanished
from .settings import BYTES, DatasetSettings

CHUNK = 1 << 20
VERSION, INDEX_VERSION = 1, 2
"""Format versions: of the tokens (part of the digest) and of the index (part of the key)."""

CODES = {1: "B", 2: "H", 4: "I"}


def tokenised(files: Sequence[File], settings: DatasetSettings) -> Documents:
    """Return the documents of these texts from the cache, after tokenising them if needed.

    Raise ValueError if a text is not UTF-8 or the cache cannot be written.
    """
    folder = Path(settings.folder) / ".ring-attn" if settings.cache is None else Path(settings.cache)
    tokenizer = _tokenizer_text(settings)
    index = folder / f"{_key(files, settings, tokenizer)}.json"
    try:
        kept = _kept(index, files)
        if kept is None:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder) as alone:
                for left in folder.glob(".writing-*") if alone else ():  # left by a killed process
                    left.unlink(missing_ok=True)
                kept = _kept(index, files)
                if kept is None:
                    kept = _written(folder, index, files, _encoder(settings, tokenizer), settings.end)
    except OSError as error:
        raise ValueError(
            f"the tokens cannot be kept in {folder} ({error.strerror or error}): pass cache=, a folder that can be written and "
            "has room"
        ) from error
    return kept


def _tokenizer_text(settings: DatasetSettings) -> bytes | None:
    """Return the content of the tokenizer's file, or None if no tokenizer is set.

    One read serves both the cache's key and the encoder, so that a file that changes meanwhile cannot make them differ.
    """
    if settings.tokenizer is None:
        return None
    try:
        return read_bytes(settings.tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer={os.fspath(settings.tokenizer)!r} cannot be read ({error}): pass a tokenizer.json"
        ) from error


def _key(files: Sequence[File], settings: DatasetSettings, text: bytes | None) -> str:
    tokenizer = None if text is None else sha256(text).hexdigest()
    end = None if settings.end is None else int(settings.end)
    what = [INDEX_VERSION, tokenizer, end, *((file.name, file.size, file.modified) for file in files)]
    return sha256(json.dumps(what).encode()).hexdigest()[:32]


def _kept(index: Path, files: Sequence[File]) -> Documents | None:
    """Return the cached documents of these files, or None if the cache is missing, damaged or of other texts."""
    try:
        kept = read_json(index)
        path = index.parent / f"{kept['digest']}.tokens"
        width, counts = kept["width"], kept["tokens"]
        numbers = [width, kept["vocab"], *counts, *kept["changed"]]
        if not all(type(x) is int and x > 0 for x in numbers) or width not in CODES or len(counts) != len(files):
            return None
        with open_file(path) as opened:
            if identity(opened.fileno()).size != width * sum(counts) or sample(opened) != kept["sample"]:
                return None
        others = [file for file, changed in zip(files, kept["changed"], strict=True) if file.changed != changed]
        texts = {file.name: text for file, text in zip(files, kept["texts"], strict=True)}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if any(_content(file) != texts[file.name] for file in others):
        return None
    if others:
        with suppress(OSError):  # not writable: the next start compares again
            _write_index(index, json.dumps(kept | {"changed": [file.changed for file in files]}))
    return _described(path, kept, files)


def _content(file: File) -> str:
    """Return the SHA-256 of a text. Raise ValueError if the file changes meanwhile."""
    content = sha256()
    try:
        with open_file(file.path) as opened:
            while chunk := opened.read(CHUNK):
                content.update(chunk)
    except OSError as error:
        raise vanished(file.path, error) from error
    unchanged(file)
    return content.hexdigest()


def _described(path: Path, kept: dict[str, Any], files: Sequence[File]) -> Documents:
    width, offset, documents = kept["width"], 0, []
    size = width * sum(kept["tokens"])
    for file, tokens in zip(files, kept["tokens"], strict=True):
        documents.append(Document(file.name, str(path), size, f"<u{width}", offset, tokens, None, kept["sample"]))
        offset += width * tokens
    return Documents(tuple(documents), kept["digest"], kept["vocab"])


def _written(folder: Path, index: Path, files: Sequence[File], encoder: tuple[Encode, int], ends: int | None) -> Documents:
    encode, vocab = encoder
    width = 1 if vocab <= 1 << 8 else 2 if vocab <= 1 << 16 else 4
    end = b"" if ends is None else int(ends).to_bytes(width, "little")
    digest, counts, texts = sha256(), [], []
    handle, path = tempfile.mkstemp(dir=folder, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as out:
            for file in files:
                size, text = 0, sha256()
                for piece in chain(_checked(encode(file, width, text), file), [end]):
                    out.write(piece)
                    digest.update(piece)
                    size += len(piece)
                unchanged(file)
                counts.append(size // width)
                texts.append(text.hexdigest())
            out.flush()
            os.fsync(out.fileno())
        digest.update(json.dumps([VERSION, width, vocab, [file.name for file in files], counts]).encode())
        kept: dict[str, Any] = {"digest": digest.hexdigest(), "width": width, "vocab": vocab, "tokens": counts, "texts": texts}
        kept["changed"] = [file.changed for file in files]
        with open_file(path) as written:
            kept["sample"] = sample(written)
        tokens = folder / f"{kept['digest']}.tokens"
        os.chmod(path, 0o644)  # mkstemp makes it private, but other users' ranks may share the folder
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
    """Yield ``pieces`` unchanged. Raise ValueError after the last one if all are empty: the text has no tokens."""
    empty = True
    for piece in pieces:
        empty = empty and not piece
        yield piece
    if empty:
        raise ValueError(f"{file.path} makes no tokens: a document has at least one, so delete the file or pass another pattern")


Encode = Callable[[File, int, Any], Iterable[bytes]]


def _encoder(settings: DatasetSettings, tokenizer_text: bytes | None) -> tuple[Encode, int]:
    """Return the function that encodes a file, and the vocabulary size.

    The function takes the file, the number of bytes of an id, and a hash object that it updates with the text.
    """
    end = -1 if settings.end is None else int(settings.end)
    if tokenizer_text is None:
        return _bytes, max(BYTES, end + 1)
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found]  # optional
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("tokenizer= needs tokenizers: run pip install tokenizers", name="tokenizers") from missing
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_text)
    except Exception as error:  # its Rust code raises several types
        raise ValueError(f"tokenizer={os.fspath(settings.tokenizer)!r} is no tokenizer.json of tokenizers: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(file: File, width: int, content: Any) -> Iterator[bytes]:
        text = b"".join(_utf8(file, content)).decode("utf-8")
        ids = array(CODES[width], tokenizer.encode(text, add_special_tokens=False).ids)
        if sys.byteorder == "big":
            ids.byteswap()
        yield ids.tobytes()

    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)  # ids may have gaps
    return encode, max(largest, end) + 1


def _bytes(file: File, width: int, content: Any) -> Iterator[bytes]:
    """Yield the bytes of a text as little-endian ids of ``width`` bytes."""
    for chunk in _utf8(file, content):
        ids = bytearray(width * len(chunk))
        ids[::width] = chunk
        yield bytes(ids)


def _utf8(file: File, content: Any) -> Iterator[bytes]:
    """Yield a file in chunks and update the hash ``content`` with them. Raise ValueError if it is not UTF-8 or has a 0 byte."""
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
            content.update(chunk)
            yield chunk
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _binary(file, "it ends within a letter of UTF-8") from error


def _opened(file: File) -> BinaryIO:
    try:
        return open_file(file.path)
    except OSError as error:
        raise vanished(file.path, error) from error


def _binary(file: File, why: str) -> ValueError:
    return ValueError(
        f"{file.path} is no text ({why}): convert it to UTF-8, save token ids with numpy.save as .npy, or pass a pattern that "
        "leaves it out, such as pattern='**/*.txt'"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of the folder, so that one process at a time tokenises into it; yield whether the system has locks.

    Wait while another process holds the lock; the system releases it if that process dies.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    check_regular(folder / ".lock")
    with open(folder / ".lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone
