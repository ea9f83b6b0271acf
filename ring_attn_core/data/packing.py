"""Packing: documents are concatenated and cut into packed rows of equal length.

Four documents of 5, 2, 8 and 4 tokens in rows of 6, with documents as letters; the last row is dropped or padded:

    row 0   A A A A A B     row 1   B C C C C C     row 2   C C C D D D     row 3   D . . . . .

Padding comes only after the last token of an epoch. A document that is cut continues in the next row. In a shuffled epoch that
row may be in another batch. So attention treats each *piece*, the span of a document in one row, as a separate document. The last
token of a piece has no label.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class DocumentSpan(NamedTuple):
    """A span of consecutive tokens of a document within one packed row."""

    document: int
    """Index of the document in the dataset."""
    first: int
    """Index in the document of the span's first token."""
    begin: int
    """Index in the row of the span's first token."""
    count: int
    """Number of tokens."""


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


def shuffled(count: int, *key: int | str) -> list[int]:
    """Return a permutation of 0 to ``count - 1`` determined by ``key``, the same in each process and Python version.
    Python guarantees this for ``random()``, but not for ``random.shuffle``: sort the indices by drawn numbers."""
    draw = random.Random("/".join(map(str, key))).random
    drawn = [draw() for _ in range(count)]
    return sorted(range(count), key=drawn.__getitem__)
