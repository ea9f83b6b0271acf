"""Packing: documents one after the other, cut into contexts of equal length.

Four documents of 5, 2, 8 and 4 tokens in contexts of 6, documents as letters; the last context is dropped or padded:

    context 0   A A A A A B     context 1   B C C C C C     context 2   C C C D D D     context 3   D . . . . .

No token is left out and no slot of a whole context is empty, so all that packing wastes is the last context of an epoch. A
document that is cut goes on in the next context, which a shuffled epoch takes at another time: what stands in one context of it,
a *piece*, is a document of its own to attention, and the last token of a piece has no label.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Piece(NamedTuple):
    """Consecutive tokens of a document, and where in a context they stand."""

    document: int
    """Which of the documents, in the order of their names."""
    first: int
    """The first of these tokens, counted from the beginning of the document."""
    begin: int
    """The position in the context where it stands."""
    count: int
    """How many tokens."""


class Contexts:
    """The documents of one epoch, in a given order, cut into contexts."""

    def __init__(self, lengths: Sequence[int], length: int, order: Sequence[int] | None = None) -> None:
        """``lengths``: tokens of every document; ``length``: tokens of a context; ``order``: the documents, None for 0, 1, ..."""
        self._length = length
        self._order = range(len(lengths)) if order is None else order
        self._ends = list(accumulate(lengths[document] for document in self._order))
        self.tokens = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        """How many contexts hold a token; only the last of them may have empty slots."""
        return -(-self.tokens // self._length)

    def pieces(self, context: int) -> tuple[Piece, ...]:
        """What stands in a context, in order of position; nothing where the tokens have come to an end."""
        start, found = context * self._length, []
        position, stop = start, min(start + self._length, self.tokens)
        at = bisect_right(self._ends, position)
        while position < stop:
            begins = self._ends[at - 1] if at else 0
            count = min(self._ends[at], stop) - position
            found.append(Piece(self._order[at], position - begins, position - start, count))
            position, at = position + count, at + 1
        return tuple(found)


def shuffled(count: int, *key: int | str) -> list[int]:
    """0 to ``count - 1`` in an order that ``key`` decides, the same in every process and with every version of Python.

    Of Python's generators only ``random()`` of a seed is promised to stay as it is, so the numbers are sorted by what it draws.
    """
    draw = random.Random("/".join(map(str, key))).random
    drawn = [draw() for _ in range(count)]
    return sorted(range(count), key=drawn.__getitem__)
