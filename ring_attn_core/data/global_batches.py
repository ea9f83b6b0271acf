"""Global batches of whole documents, each planned as equally many microbatches (``batch_tokens`` of a dataset).

The documents of an epoch, in its order, fill the microbatches of a global batch by best fit. The first document that has no room
in any begins the next global batch. ``plan/batches.py`` then distributes the documents of each global batch for equal compute,
or, if it fails, as best fit has shown that they fit. All global batches have the same number of microbatches. So the number of a
microbatch, counted from the beginning of the first epoch, says where a run stands, also in the middle of a global batch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import Any

from ..lazy_numpy import np
from ..plan.batches import ComputeCost, best_fit, deal, pairs_of
from .index import DocumentSpan, Index, shuffle
from .settings import DatasetSettings


class GlobalBatches(Index):
    """The microbatches of all epochs. Each is given as the spans of whole documents in one packed row."""

    def __init__(self, lengths: Sequence[int], settings: DatasetSettings) -> None:
        """Count the microbatches. Raise ValueError if a document is too long, or if there is not even one global batch."""
        assert settings.batch_tokens is not None
        self._lengths, self._settings, self._parts = lengths, settings, settings.batch_tokens // settings.length
        longest = max(lengths)
        if longest > settings.length:
            fits = -(-longest // settings.ranks) * settings.ranks
            raise ValueError(
                f"{settings.folder} has a document of {longest} tokens, and with batch_tokens= each document stays whole in a "
                f"microbatch of length={settings.length}: pass length={fits} or more, or cut the document"
            )
        self._begins: tuple[int, ...] = (0,)  # the number of the first global batch of each epoch counted so far
        self._known: dict[str, tuple[int, tuple[list[int], list[int]]]] = {}  # the last result of _order and _dealt
        self.batches = self._parts * self._count(0)
        if not self.batches:
            raise ValueError(
                f"{settings.folder} holds {sum(lengths)} tokens, which do not fill one global batch of batch_tokens="
                f"{settings.batch_tokens}: pass last='pad', a smaller batch_tokens, or more text"
            )
        self.end = None
        if settings.epochs is not None:
            self.end = self._parts * sum(self._count(epoch) for epoch in range(settings.epochs))

    def batch(self, number: int) -> list[tuple[DocumentSpan, ...]]:
        """Return the document spans of microbatch ``number``, as the only row; () for a row of padding alone."""
        documents, dealt = self._dealt(number // self._parts)
        held = [document for document, part in zip(documents, dealt, strict=True) if part == number % self._parts]
        begins = accumulate((self._lengths[document] for document in held), initial=0)
        return [tuple(DocumentSpan(each, 0, begin, self._lengths[each]) for each, begin in zip(held, begins, strict=False))]

    def first(self, epoch: int) -> int:
        """Return the number of the first microbatch of an epoch."""
        return self._parts * self._begin(epoch)

    def left_out(self, epoch: int) -> int:
        """Return how many documents of an epoch no global batch has, because they do not fill one more."""
        order, ends = self._order(epoch)
        return len(order) - ends[-1]

    def group(self, number: int) -> int:
        return number // self._parts

    def documents(self, number: int) -> list[int]:
        return self._dealt(self.group(number))[0]

    def _dealt(self, group: int) -> tuple[list[int], list[int]]:
        """Return the documents of global batch ``group``, and the microbatch of each."""
        return self._remember("dealt", group, self._deal)

    def _order(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return the documents of an epoch in order, and for each of its global batches the end of its documents in it."""
        return self._remember("order", epoch, self._order_of)

    def _remember(self, name: str, key: int, make: Callable[[int], Any]) -> Any:
        known = self._known.get(name)
        if known is None or known[0] != key:
            known = self._known[name] = key, make(key)
        return known[1]  # not of the dict, in which another thread may have stored another one

    def _deal(self, group: int) -> tuple[list[int], list[int]]:
        epoch = next(epoch for epoch in count() if group < self._begin(epoch + 1))
        order, ends = self._order(epoch)
        at = group - self._begin(epoch)
        documents = order[ends[at - 1] if at else 0 : ends[at]]
        sizes, capacity = np.array([self._lengths[document] for document in documents]), self._settings.length
        dealt = deal(sizes, pairs_of(sizes, ComputeCost().masks), self._parts, capacity, self._settings.seed + group, 0.0)
        if dealt is None:
            dealt = best_fit(sizes.tolist(), range(len(sizes)), capacity)
        return documents, dealt.tolist()

    def _begin(self, epoch: int) -> int:
        begins = self._begins
        while len(begins) <= epoch:
            begins = self._begins = (*begins, begins[-1] + len(self._order(len(begins) - 1)[1]))  # threads may store equal ones
        return begins[epoch]

    def _count(self, epoch: int) -> int:
        return self._begin(epoch + 1) - self._begin(epoch)

    def _order_of(self, epoch: int) -> tuple[list[int], list[int]]:
        settings, capacity, ends = self._settings, self._settings.length, []
        every = range(len(self._lengths))
        order = shuffle(len(every), "documents", settings.seed, epoch) if settings.shuffle else list(every)
        rooms: list[int] = []
        for at, document in enumerate(order):
            size = self._lengths[document]
            fit = bisect_left(rooms, size)
            if fit == len(rooms) and len(rooms) == self._parts:
                ends.append(at)
                rooms, fit = [], 0
            insort(rooms, (rooms.pop(fit) if fit < len(rooms) else capacity) - size)
        if settings.last == "pad" or (len(rooms) == self._parts and not rooms[-1]):
            ends.append(len(order))
        return order, ends


def index_of(lengths: Sequence[int], settings: DatasetSettings) -> Index:
    """Return the index of the batches, or with ``batch_tokens`` that of the microbatches. ``lengths``: tokens by document."""
    return (Index if settings.batch_tokens is None else GlobalBatches)(lengths, settings)
