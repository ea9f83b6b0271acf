"""The batches that a rank reads from a folder, as numpy arrays."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..lazy_numpy import np
from ..plan.balanced_layout import BalancedLayout
from . import row_files, token_arrays
from .cache import tokenise
from .documents import File, TokenizedDocuments, find_files
from .global_batches import GlobalBatches, index_of
from .index import DocumentSpan, ShardSpan, batches_of, reads, state_of
from .reader import Reader
from .settings import COLUMN, DatasetSettings


def documents_of(settings: DatasetSettings) -> TokenizedDocuments:
    files = row_files.without_descriptions(find_files(settings))
    arrays = [file for file in files if file.name.endswith(token_arrays.SUFFIX)]
    if not arrays:
        _check_rows(files, settings)
        return tokenise(files, settings)
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
    return token_arrays.describe(arrays)


def _check_rows(files: Sequence[File], settings: DatasetSettings) -> None:
    rows, texts = ([file.name for file in files if row_files.is_row_file(file) == wanted] for wanted in (True, False))
    if rows and texts:
        raise ValueError(
            f"{settings.folder} holds files of rows such as {rows[0]} and texts such as {texts[0]}: pass "
            f"pattern='**/*{os.path.splitext(rows[0])[1]}' for the rows, or a pattern of the texts"
        )
    kinds, wrong = ", ".join(row_files.SUFFIXES), ""
    if settings.chat is not None:
        wrong = f"chat={settings.chat!r} is for {kinds} files with a chat in each row"
    elif settings.column != COLUMN:
        wrong = f"column={settings.column!r} is for {kinds} files"
    if texts and wrong:
        raise ValueError(
            f"{wrong}, and {settings.folder} holds texts such as {texts[0]}: leave it out, or pass a pattern of such files"
        )


class BatchArrays(NamedTuple):
    """One batch as numpy arrays: the tokens of one rank, or of all ranks in rank order if ``DatasetSettings.rank`` is None."""

    ids: np.ndarray
    """int32 [batch, tokens]: token ids; 0 in padding."""
    labels: np.ndarray
    """int32 [batch, tokens]: the target of each token, which is the next token, or ``ignore_index`` if it has no target."""
    positions: np.ndarray
    """int32 [batch, tokens]: positions in the packed row; with ``restart_positions``, within the token's document in this row."""
    extents: np.ndarray
    """int32 [batch, tokens, 2]: first and end (exclusive) position of each token's document in the packed row; 0 in padding."""
    layout: BalancedLayout | None = None
    """The balanced layout of the batch; None in other layouts."""
    batch_labels: int | None = None
    """The number of labels of the whole global batch, at least 1; None without ``batch_tokens``."""


class Batches:
    """The batches of a training run, with the position that the run has reached."""

    def __init__(self, settings: DatasetSettings) -> None:
        data = documents_of(settings)
        self.settings, self.vocab, self._digest = settings, data.vocab, data.digest
        self.reader = Reader(data.documents)
        self.index = index_of([document.tokens for document in data.documents], settings)
        self._counted: dict[int, int] = {}
        self.start = self.yielded = 0
        """``start``: number of the batch with which the next iteration begins. ``yielded``: number of the last yielded batch + 1;
        equal to ``start`` until a batch is yielded."""

    def iterate(self, offset: int = 0, every: int = 1) -> Iterator[BatchArrays]:
        """Yield every ``every``-th batch of all epochs from batch ``self.start + offset`` on; endlessly if ``epochs`` is None."""
        self.reader.check()
        start = self.start
        self.yielded = start
        end = self.index.end
        for number in itertools.count(start + offset, every) if end is None else range(start + offset, end, every):
            arrays = self.arrays(number)
            self.yielded = number + 1
            yield arrays

    def arrays(self, number: int) -> BatchArrays:
        settings, rows = self.settings, self.index.batch(number)
        dealt = settings.deal([span.count for span in spans] for spans in rows)
        runs = settings.runs(dealt)
        where = np.concatenate([np.arange(run.start, run.start + run.stride * run.length, run.stride) for run in runs])
        shape = settings.batch_size, len(where)
        ids, labels = np.zeros(shape, np.int32), np.full(shape, settings.ignore_index, np.int32)
        positions, extents = np.tile(where.astype(np.int32), (settings.batch_size, 1)), np.zeros((*shape, 2), np.int32)
        for row, spans in enumerate(rows):
            for read in reads(spans, runs):
                slots, span = slice(read.slot, read.slot + read.count), read.span
                tokens, following = self.reader.read(read)
                ids[row, slots] = tokens
                labels[row, read.slot : read.slot + read.labelled] = np.where(following < 0, settings.ignore_index, following)
                extents[row, slots] = span.begin, span.begin + span.count
        if settings.restart_positions:
            positions -= extents[..., 0]
        return BatchArrays(ids, labels, positions, extents, dealt, self._count_labels(number))

    def _count_labels(self, number: int) -> int | None:
        """Return the labels of the whole global batch, at least 1, or None. Count marked tokens by one read of all."""
        if not isinstance(self.index, GlobalBatches):
            return None
        group, known = self.index.group(number), self._counted
        if group not in known:
            found = max(sum(map(self._labels_of, self.index.documents(number))), 1)
            self._counted = known = dict([*known.items()][-1:]) | {group: found}  # keep two: threads may be at a border
        return known[group]

    def _labels_of(self, document: int) -> int:
        described = self.reader.documents[document]
        if not described.marked:
            return described.tokens - 1
        span = DocumentSpan(document, 0, 0, described.tokens)
        _, following = self.reader.read(ShardSpan(0, span, 0, span.count, 1, span.count - 1))
        return int((following >= 0).sum())

    def state(self, batches: int | None = None) -> str:
        """Return the state of the run after ``batches`` batches (None: those yielded so far), as JSON for :meth:`resume`."""
        return state_of(self.yielded if batches is None else batches, self._digest, self.index, self.settings)

    def resume(self, state: object) -> None:
        self.start = self.yielded = batches_of(state, self._digest, self.index, self.settings)
