"""Token arrays: one document in each file, written by numpy.save and read in place."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import BinaryIO

from ..files import identity, read_at, sample
from ..lazy_numpy import np
from .documents import Document, File, TokenizedDocuments, empty, open_found

SUFFIX = ".npy"


def describe(files: Sequence[File]) -> TokenizedDocuments:
    documents, digest = [], sha256()
    for file in files:
        with open_found(file.path) as array:
            document = _array(file, array)
        documents.append(document)
        digest.update(json.dumps([document.name, document.dtype, document.tokens]).encode() + document.sample.encode())
    return TokenizedDocuments(tuple(documents), digest.hexdigest(), None)


def _array(file: File, opened: BinaryIO) -> Document:
    """Return the document of a token array. Read only the header and the blocks that ``sample`` hashes."""
    try:
        if read_at(opened, 0, 6) != b"\x93NUMPY":
            raise ValueError("it does not begin as numpy.save writes one")
        version = np.lib.format.read_magic(opened)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its format is version {version[0]}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read(opened)
        dtype, offset = kind.str, opened.tell()
        if not re.fullmatch(r"[<>|=]?[iu][1248]", dtype):
            raise ValueError(f"its dtype is {dtype!r}")
        if len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
            raise ValueError(f"its shape is {shape!r}"[:99])
        (tokens,) = shape
    except Exception as error:  # a damaged header raises many types in numpy
        raise ValueError(
            f"{file.path} is not an array of token ids, integers of one dimension as numpy.save writes them ({_short(error)}): "
            f"save it as numpy.save(path, ids.reshape(-1)), or pass a pattern that leaves it out"
        ) from error
    if not tokens:
        raise empty(file.path)
    if file.size < offset + tokens * int(dtype[-1]):
        raise ValueError(f"{file.path} ends before its {tokens} tokens do: it was not written or copied to the end, do so again")
    return Document(file.name, file.path, file.size, dtype, offset, tokens, identity(opened.fileno()), sample(opened))


def _short(error: Exception) -> str:
    """Return the first line of an error's message, cut after 99 characters, because Python may quote the whole header."""
    if isinstance(error, RecursionError | MemoryError):
        return "its header is nested too deeply"
    text = str(error).partition("\n")[0]
    return text if len(text) <= 99 else text[:99] + "..."
