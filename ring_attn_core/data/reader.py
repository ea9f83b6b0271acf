"""A reader of documents' tokens that detects changed files and counts the bytes that a rank reads (``bytes_read``).

A rank reads the tokens of its shard as parts of documents (``ShardSpan`` of index.py). After each part it reads at most one token
more, the label of the part's last token. An id takes the bytes of its array's dtype; in the cache that is 1, 2 or 4. In a
striped layout the tokens of all ranks alternate, so the rank reads them all, once for ids and once for labels; ``bytes_read``
counts the ids and labels of its shard only. At the first read of a file of the cache, and if a file's ``stat`` has changed (see
``Reader``), the reader also reads at most 16 blocks of 4,096 bytes (``sample`` of files.py). Their digest shows if the content
has changed.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from ..files import Identity, identity, open_file, read_at, sample
from ..lazy_numpy import np
from .documents import Document, identity_now, vanished_error
from .index import ShardSpan
from .settings import MAX_INT32

MAX_OPEN = 64


class _SharedFile:
    """An open file that is closed when the reader and all threads that read from it have released it."""

    def __init__(self, path: str) -> None:
        with open_file(path) as file:
            self._number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number).atexit = False  # a process that ends closes its files anyway

    def fileno(self) -> int:
        return self._number


class Reader:
    """A reader of documents' tokens; an unpickled copy opens the files again.
    Each read checks size and modification time; only a file of the cache may be replaced by a new one. The digest of sampled
    blocks is compared after any other change (rename, link, chmod, replacement), and at the first read of a file of the cache."""

    def __init__(self, documents: tuple[Document, ...]) -> None:
        self.documents = documents
        self.bytes_read = 0
        """Number of bytes of the tokens read, without the tokens that a stride skips and without sampled blocks."""
        self._begin()

    def _begin(self) -> None:
        self._files: dict[str, _SharedFile] = {}
        self._seen: dict[str, Identity] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"documents": self.documents, "bytes_read": self.bytes_read}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._begin()

    def check(self) -> None:
        """Raise ValueError if any file has vanished or changed; of a file of the cache the modification time is not compared."""
        for path, document in {document.path: document for document in self.documents}.items():
            _check_unwritten(document, identity_now(path))

    def read(self, read: ShardSpan) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids [read.count] and the labels [read.labelled] of a span; -1 if the next id is marked as unlabelled."""
        if read.stride == 1:
            tokens = self._tokens(read.span.document, read.first, max(read.count, read.labelled + 1), 1)
            ids, labels = tokens[: read.count], tokens[1 : 1 + read.labelled]
        else:
            parts = (read.first, read.count), (read.first + 1, read.labelled)
            ids, labels = (self._tokens(read.span.document, *part, read.stride) for part in parts)
        if self.documents[read.span.document].marked:
            ids, labels = ids ^ (ids >> 63), labels.clip(-1)  # the id of a token without a label is negative: complement it
        return ids, labels

    def _tokens(self, document: int, first: int, count: int, stride: int) -> np.ndarray:
        """Return int64 ids of ``count`` tokens from ``first`` on; the complement of a marked id, a negative number."""
        file = self.documents[document]
        dtype = np.dtype(file.dtype)
        tokens = np.frombuffer(self._bytes(file, first, (count - 1) * stride + 1 if count else 0), dtype)[::stride]
        self.bytes_read += count * dtype.itemsize
        if file.marked:
            highest = 1 << (8 * dtype.itemsize - 1)
            wide = tokens.astype(np.int64)
            return np.where(wide & highest, ~(wide & ~highest), wide)
        if count and not 0 <= tokens.min() <= tokens.max() <= MAX_INT32:
            wrong = tokens[(tokens < 0) | (tokens > MAX_INT32)][0]
            raise ValueError(
                f"{file.path} holds the id {wrong}: token ids are 0 to {MAX_INT32}, so write the array anew without it"
            )
        return tokens.astype(np.int64)

    def _bytes(self, document: Document, first: int, count: int) -> bytes:
        size = int(document.dtype[-1])
        try:
            held = self._opened(document)
            data = read_at(held, document.offset + first * size, count * size)
            self._check_same(document, held)
        except OSError as error:
            raise vanished_error(document.path, error) from error
        if len(data) < count * size:
            raise ValueError(f"{document.path} ended while it was read: make the dataset anew when it is written")
        return data

    def _opened(self, document: Document) -> _SharedFile:
        held = self._files.get(document.path) or self._files.setdefault(document.path, _SharedFile(document.path))
        for path in [*self._files][:-MAX_OPEN]:
            self._files.pop(path, None)  # another thread may have done so
        return held

    def _check_same(self, document: Document, file: _SharedFile) -> None:
        seen, now = self._seen.get(document.path, document.identity), identity(file.fileno())
        if now == seen:
            return
        _check_unwritten(document, now)
        written = seen is not None and now[:2] == seen[:2] and now.modified != seen.modified
        if written or sample(file) != document.sample:
            raise changed_error(document.path)
        self._seen[document.path] = now


def _check_unwritten(document: Document, now: Identity) -> None:
    """Raise ValueError if a file's size or, unless it is of the cache, its modification time has changed."""
    if now.size != document.size:
        had = f"had {document.size} bytes when the dataset was made and has {now.size}"
        raise ValueError(f"{document.path} {had}: make the dataset anew")
    if document.identity is not None and now.modified != document.identity.modified:
        raise changed_error(document.path)


def changed_error(path: str) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} was written to after the dataset was made: make the dataset anew, or restore file and time"
    )
