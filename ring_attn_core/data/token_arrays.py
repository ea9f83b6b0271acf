"""Token arrays: files that numpy.save wrote, one document each, which are mapped into memory where they lie."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from hashlib import sha256

from .documents import Document, Documents, File, empty, vanished

SUFFIX = ".npy"
SAMPLE = 4096
"""Bytes at the beginning and the end of a token array that its digest is made of: nobody reads all of it to begin a run."""


def described(files: Sequence[File]) -> Documents:
    """The documents of these files. ValueError for what is no array of token ids."""
    documents = tuple(map(_array, files))
    digest = sha256()
    for document in documents:
        digest.update(json.dumps([document.name, document.dtype, document.tokens]).encode() + _sample(document))
    return Documents(documents, digest.hexdigest(), None)


def _array(file: File) -> Document:
    """A token array: one dimension of integers as numpy.save writes it, whose header is all that is read of it."""
    try:
        with open(file.path, "rb") as opened:
            start = opened.read(8)
            if start[:6] != b"\x93NUMPY":
                raise ValueError("it does not begin as numpy.save writes one")
            length = int.from_bytes(opened.read(2 if start[6] == 1 else 4), "little")
            if length > file.size:
                raise ValueError("its header is longer than the file")
            header = ast.literal_eval(opened.read(length).decode("latin1"))
            offset = opened.tell()
        (tokens,), dtype = header["shape"], header["descr"]
        if not (isinstance(dtype, str) and re.fullmatch(r"[<>|=]?[iu][1248]", dtype)):
            raise ValueError(f"its dtype is {dtype!r}")
    except OSError as error:
        raise vanished(file.path, error) from error
    except (ValueError, SyntaxError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{file.path} is no array of token ids, integers of one dimension as numpy.save writes them ({error}): save it as "
            f"numpy.save(path, ids.reshape(-1)), or pass a pattern that leaves it out"
        ) from error
    if not tokens:
        raise empty(file.path)
    if file.size < offset + tokens * int(dtype[-1]):
        raise ValueError(f"{file.path} ends before its {tokens} tokens do: it was not written or copied to the end, do so again")
    return Document(file.name, file.path, file.size, dtype, offset, tokens)


def _sample(document: Document) -> bytes:
    size = document.tokens * int(document.dtype[-1])
    try:
        with open(document.path, "rb") as opened:
            opened.seek(document.offset)
            first = opened.read(min(SAMPLE, size))
            opened.seek(document.offset + max(size - SAMPLE, 0))
            return first + opened.read(min(SAMPLE, size))
    except OSError as error:
        raise vanished(document.path, error) from error
