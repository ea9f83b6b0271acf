"""The arrays of one rank's batches, read from documents that are mapped into memory. numpy is imported where it is used."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from . import token_arrays
from .cache import tokenised
from .documents import Document, Documents, found, vanished
from .index import Index, Read, batches_of, reads, state_of
from .settings import LARGEST, Settings

if TYPE_CHECKING:
    import numpy as np

MOST_MAPS = 64
"""How many files a process keeps open."""


def documents_of(settings: Settings) -> Documents:
    """The documents of the folder; ValueError for a folder or a file that holds none, which is the same on every rank."""
    files = found(settings)
    arrays = [file for file in files if file.name.endswith(token_arrays.SUFFIX)]
    if not arrays:
        return tokenised(files, settings)
    texts = [file for file in files if not file.name.endswith(token_arrays.SUFFIX)]
    if texts:
        raise ValueError(
            f"{settings.folder} holds token arrays such as {arrays[0].name} and texts such as {texts[0].name}: pass "
            "pattern='**/*.npy' for the arrays, or a pattern of the texts"
        )
    if settings.tokenizer is not None or settings.end is not None:
        raise ValueError(
            f"tokenizer= and end= are for texts, and {settings.folder} holds token arrays such as {arrays[0].name}: leave them "
            "out, or pass a pattern of texts"
        )
    return token_arrays.described(arrays)


class Arrays(NamedTuple):
    """What the ``Shard`` of either framework is made of; ``tokens`` are those of one rank, or of all where ``rank`` is None."""

    ids: np.ndarray
    """int32 [batch, tokens]"""
    labels: np.ndarray
    """int32 [batch, tokens]"""
    positions: np.ndarray
    """int32 [batch, tokens]"""
    extents: np.ndarray
    """int32 [batch, tokens, 2]"""


class Reader:
    """The tokens of documents; what it has open stays behind where it is sent to another process."""

    def __init__(self, documents: tuple[Document, ...]) -> None:
        self._documents = documents
        self._maps: OrderedDict[str, np.ndarray] = OrderedDict()
        self.bytes_read = 0
        """How many bytes of tokens were copied out of the maps."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": OrderedDict()}

    def check(self) -> None:
        """ValueError where a file has vanished or has another size, which every rank finds alike before it reads its part."""
        for path, size in {document.path: document.size for document in self._documents}.items():
            _check_file(path, size)

    def read(self, read: Read) -> tuple[np.ndarray, np.ndarray]:
        """ids [count] and labels [labelled] of a read."""
        if read.stride == 1:
            tokens = self._tokens(read.piece.document, read.first, max(read.count, read.labelled + 1), 1)
            return tokens[: read.count], tokens[1 : 1 + read.labelled]
        ids, labels = ((read.first, read.count), (read.first + 1, read.labelled))
        return tuple(self._tokens(read.piece.document, *each, read.stride) for each in (ids, labels))  # type: ignore[return-value]

    def _tokens(self, document: int, first: int, count: int, stride: int) -> np.ndarray:
        import numpy as np

        of = self._documents[document]
        dtype = np.dtype(of.dtype)
        begin, end = (of.offset + token * dtype.itemsize for token in (first, first + (count - 1) * stride + 1))
        tokens = self._map(of)[begin : max(end, begin)].view(dtype)[::stride].astype(np.int64)
        self.bytes_read += count * dtype.itemsize
        if count and not 0 <= tokens.min() <= tokens.max() <= LARGEST:
            wrong = tokens[(tokens < 0) | (tokens > LARGEST)][0]
            raise ValueError(f"{of.path} holds the id {wrong}: token ids are 0 to {LARGEST}, so write the array anew without it")
        return tokens

    def _map(self, document: Document) -> np.ndarray:
        import numpy as np

        if document.path not in self._maps:
            _check_file(document.path, document.size)
            try:
                self._maps[document.path] = np.asarray(np.memmap(document.path, np.uint8, "r"))
            except OSError as error:
                raise vanished(document.path, error) from error
            if len(self._maps) > MOST_MAPS:
                self._maps.popitem(last=False)
        self._maps.move_to_end(document.path)
        return self._maps[document.path]


class Batches:
    """A run over the data: where it began, where it stands, and the arrays of every batch."""

    def __init__(self, settings: Settings) -> None:
        data = documents_of(settings)
        self.settings, self.vocab, self._digest = settings, data.vocab, data.digest
        self.reader = Reader(data.documents)
        self.index = Index([document.tokens for document in data.documents], settings)
        self.start = self.given = 0
        """How many batches came before the first of an iteration, and before the next of the latest."""

    def iterate(self, offset: int = 0, every: int = 1) -> Iterator[Arrays]:
        """The batches from ``start`` to the end; of every ``every`` of them the one at ``offset``."""
        self.reader.check()
        start = self.start
        self.given = start
        end = self.index.end
        for number in itertools.count(start + offset, every) if end is None else range(start + offset, end, every):
            arrays = self.arrays(number)
            self.given = number + 1
            yield arrays

    def arrays(self, number: int) -> Arrays:
        """A batch by its number."""
        import numpy as np

        of, runs = self.settings, self.settings.runs()
        where = np.concatenate([np.arange(run.start, run.start + run.stride * run.length, run.stride) for run in runs])
        shape = of.batch_size, len(where)
        ids, labels = np.zeros(shape, np.int32), np.full(shape, of.ignore_index, np.int32)
        positions, extents = np.tile(where.astype(np.int32), (of.batch_size, 1)), np.zeros((*shape, 2), np.int32)
        for row, pieces in enumerate(self.index.batch(number)):
            for read in reads(pieces, runs):
                slots, piece = slice(read.slot, read.slot + read.count), read.piece
                tokens, following = self.reader.read(read)
                ids[row, slots] = tokens
                labels[row, read.slot : read.slot + read.labelled] = following
                extents[row, slots] = piece.begin, piece.begin + piece.count
        if of.restart_positions:
            positions -= extents[..., 0]
        return Arrays(ids, labels, positions, extents)

    def state(self, batches: int | None = None) -> str:
        """Where the run stands, as JSON: after the batches that were given, or after ``batches`` from the very beginning."""
        return state_of(self.given if batches is None else batches, self._digest, self.index, self.settings)

    def resume(self, state: object) -> None:
        """Begin where a state stands."""
        self.start = self.given = batches_of(state, self._digest, self.index, self.settings)


def _check_file(path: str, size: int) -> None:
    try:
        now = os.stat(path).st_size
    except OSError as error:
        raise vanished(path, error) from error
    if now != size:
        raise ValueError(f"{path} had {size} bytes when the dataset was made and has {now}: make the dataset anew")
