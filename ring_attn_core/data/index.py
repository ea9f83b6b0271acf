"""The index of a dataset: the tokens of each batch, the part of it that each rank reads, and the state for resuming a run.

Batches are numbered from the beginning of the first epoch. The tokens of a batch depend on its number, the documents and the
settings that ``_decides`` returns, not on the ranks or the layout. So each process can make any batch, and one number says where
a run stands. A run may resume with another layout and other numbers of ranks and workers.

Documents are concatenated and cut into packed rows of equal length. Four documents of 5, 2, 8 and 4 tokens in rows of 6, with
documents as letters; the last row is dropped or padded:

    row 0   A A A A A B     row 1   B C C C C C     row 2   C C C D D D     row 3   D . . . . .

A document that is cut continues in the next row, in a shuffled epoch perhaps in another batch. So attention treats each *piece*,
the span of a document in one row, as a separate document, and the last token of a piece has no label.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ..files import parse_json
from ..runs import Run
from ..validation import in_words, is_integer
from .settings import DatasetSettings

FORMAT = 1
"""Version of the state; it changes with the state's fields or the order of the batches."""


class DocumentSpan(NamedTuple):
    """A span of consecutive tokens of a document within one packed row."""

    document: int
    """Index of the document in the dataset."""
    first: int
    """Index in the document of the span's first token."""
    begin: int
    """Index in the row of the span's first token."""
    count: int


class PackedRows:
    """The documents of an epoch in a given order, cut into packed rows."""

    def __init__(self, lengths: Sequence[int], length: int, order: Sequence[int] | None = None) -> None:
        """Lay out the documents in ``order`` (None: 0, 1, ...). ``lengths``: tokens per document. ``length``: tokens per row."""
        self._length = length
        self._order = range(len(lengths)) if order is None else order
        self._ends = list(accumulate(lengths[document] for document in self._order))
        self.tokens = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        """Return the number of rows that hold at least one token."""
        return -(-self.tokens // self._length)

    def spans(self, row: int) -> tuple[DocumentSpan, ...]:
        """Return the spans of documents in row number ``row``, in order of position; () if the row is all padding."""
        start, found = row * self._length, []
        position, stop = start, min(start + self._length, self.tokens)
        at = bisect_right(self._ends, position)
        while position < stop:
            begins = self._ends[at - 1] if at else 0
            count = min(self._ends[at], stop) - position
            found.append(DocumentSpan(self._order[at], position - begins, position - start, count))
            position, at = position + count, at + 1
        return tuple(found)


def shuffle(count: int, *key: int | str) -> list[int]:
    """Return a permutation of 0 to ``count - 1`` determined by ``key``, the same in each process and Python version.
    Python guarantees this for ``random()``, but not for ``random.shuffle``: sort the indices by drawn numbers."""
    draw = random.Random("/".join(map(str, key))).random
    drawn = [draw() for _ in range(count)]
    return sorted(range(count), key=drawn.__getitem__)


class ShardSpan(NamedTuple):
    """Consecutive slots of a shard that hold tokens of one document. Tokens in neighbouring slots are ``stride`` tokens apart."""

    slot: int
    """Index in the shard of the first of these slots."""
    span: DocumentSpan
    first: int
    """Index in the document of the token in the first slot; each next slot has the token ``stride`` further on."""
    count: int
    stride: int
    labelled: int
    """Number of these tokens that have a label. A label is the next token of ``span``, so the last token of ``span`` has none."""


def reads(spans: Iterable[DocumentSpan], runs: Sequence[Run]) -> Iterator[ShardSpan]:
    """Yield each overlap of a document span of a packed row with a run of the rank.
    A label is the next token of its span, and the last token has none. So in a run of stride 1 the reader reads one token more
    than the part, unless the part ends the span; with another stride it reads the labels separately."""
    spans, slot = tuple(spans), 0
    for run in runs:
        for span in spans:
            index = lambda position, run=run: -(-(position - run.start) // run.stride)  # the first slot at or after the position
            begin, end = max(index(span.begin), 0), min(index(span.begin + span.count), run.length)
            if begin < end:
                position, final = run.start + begin * run.stride, run.start + (end - 1) * run.stride
                ends = final == span.begin + span.count - 1
                first = span.first + position - span.begin
                yield ShardSpan(slot + begin, span, first, end - begin, run.stride, end - begin - ends)
        slot += run.length


class Index:
    """The batches of all epochs. Each batch is given as the spans of documents in its packed rows."""

    def __init__(self, lengths: Sequence[int], settings: DatasetSettings) -> None:
        """Count the batches. ``lengths``: tokens of each document. Raise ValueError if there is not even one batch."""
        self._lengths, self._settings = lengths, settings
        self._epoch: tuple[int, PackedRows, Sequence[int]] | None = None
        tokens, batch = sum(lengths), settings.rows * settings.length
        self.batches = tokens // batch if settings.last == "drop" else -(-tokens // batch)
        if not self.batches:
            raise ValueError(
                f"{settings.folder} holds {tokens} tokens, and one batch of {settings.rows} x {settings.length} needs {batch}: "
                "pass last='pad', a shorter length, a smaller batch, or more text"
            )
        self.end = None if settings.epochs is None else settings.epochs * self.batches
        """Number of batches of all epochs; None if epochs are unlimited."""

    def batch(self, number: int) -> list[tuple[DocumentSpan, ...]]:
        """Return the document spans of each packed row of this replica in batch ``number``; () for a row of padding alone."""
        epoch, at = divmod(number, self.batches)
        packed_rows, order = self._packed_rows(epoch)
        first = at * self._settings.rows + self._settings.replica * self._settings.batch_size
        wanted = range(first, first + self._settings.batch_size)
        return [packed_rows.spans(order[row] if row < len(order) else row) for row in wanted]

    def _packed_rows(self, epoch: int) -> tuple[PackedRows, Sequence[int]]:
        """Return the packed rows of an epoch, and the order of the full ones; a last row that is not full comes after them."""
        if self._epoch is None or self._epoch[0] != epoch:
            settings, key = self._settings, (self._settings.seed, epoch)
            documents = shuffle(len(self._lengths), "documents", *key) if settings.shuffle else None
            packed_rows = PackedRows(self._lengths, settings.length, documents)
            whole = packed_rows.tokens // settings.length
            order = shuffle(whole, "contexts", *key) if settings.shuffle else range(whole)
            self._epoch = epoch, packed_rows, order
        return self._epoch[1:]


def state_of(batches: int, data: str, index: Index, settings: DatasetSettings) -> str:
    """Return the state of a run after ``batches`` batches as JSON. ``data``: the digest of the documents."""
    return json.dumps({"format": FORMAT, "batches": _check_count(batches, index, settings), **_decides(data, settings)})


def batches_of(state: object, data: str, index: Index, settings: DatasetSettings) -> int:
    """Return the batch count stored in ``state``. ``data``: the digest of the documents."""
    found: Any = state
    if isinstance(state, str | bytes):
        try:
            found = parse_json(state)
        except ValueError as error:
            raise ValueError(f"state must be what .state() returned, JSON, but it cannot be read as JSON: {error}") from error
    decides = _decides(data, settings)
    names = ["format", "batches", *decides]
    if not isinstance(found, Mapping) or set(found) != set(names):
        raise ValueError(f"state must be what .state() returned, with {', '.join(names)}, got {_short(found)}")
    if found["format"] != FORMAT:
        raise ValueError(
            f"this state has format {_short(found['format'])}, and this version of ring-attn goes on from format {FORMAT}: go on "
            "with the version that wrote it, or begin anew, without resume"
        )
    for name, value in decides.items():
        if found[name] == value and type(found[name]) is type(value):
            continue
        if name == "data":
            raise ValueError(
                f"the files in {settings.folder} are not those of this state (other names, texts, tokenizer, end or pattern): "
                "restore them, or begin anew, without resume"
            )
        raise ValueError(
            f"this state is of a run with {name}={_short(found[name])}, and this dataset has {name}={value!r}: make the dataset "
            "as it was, or begin anew, without resume"
        )
    return _check_count(found["batches"], index, settings)


def _check_count(batches: Any, index: Index, settings: DatasetSettings) -> int:
    """Return ``batches`` as an int. Raise ValueError if it is not an integer from 0 to the number of batches of all epochs."""
    if not is_integer(batches) or batches < 0 or (index.end is not None and batches > index.end):
        most = " or more" if index.end is None else f" to {index.end}, all that epochs={settings.epochs} have"
        raise ValueError(f"a state counts the batches that were taken, 0{most}, got {_short(batches)}")
    return int(batches)


def _decides(data: str, settings: DatasetSettings) -> dict[str, object]:
    """Return the documents' digest and some settings by name. These and the number of a batch determine the batch's tokens."""
    counts = {"length": int(settings.length), "contexts_per_batch": int(settings.rows), "seed": int(settings.seed)}
    whole = {} if settings.batch_tokens is None else {"batch_tokens": int(settings.batch_tokens)}
    return {"data": data, **counts, "shuffle": settings.shuffle, "last": settings.last, **whole}


def _short(x: object) -> str:
    """Return ``x`` in at most about 100 characters for an error message; a mapping is shown by its keys."""
    text = f"the keys {', '.join(map(str, x))}" if isinstance(x, Mapping) else in_words(x)
    return text if len(text) <= 99 else text[:99] + "..."
