"""What the host knows of a cache without asking the device: how long every request is at most, and what the ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .spec import CacheSpec


class Ledger:
    """Upper bounds of the lengths of a cache's requests, and its counts where they are known exactly.

    ``lengths``: how many tokens every request has at most; a step may add fewer than it could, and rejected tokens are taken
    back on the device. ``counts`` [requests][ranks]: None where the host does not know. ``reached``: how long every request has
    been at most.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.know([[0] * spec.ranks] * spec.batch, [0] * spec.batch)

    def know(self, counts: Sequence[Sequence[int]], reached: Sequence[int]) -> None:
        """Take what the device has."""
        self.counts: list[list[int]] | None = [list(row) for row in counts]
        self.lengths = [sum(row) for row in counts]
        self.reached = list(reached)

    @property
    def empty(self) -> bool:
        """Whether no request has a token."""
        return not any(self.lengths)

    def appended(self, rows: Iterable[int], tokens: int) -> None:
        """Add at most ``tokens`` to these requests, by a step whose placement nobody computes on the host."""
        self.counts = None
        for row in rows:
            self._grow(row, tokens)

    def written(self, rows: Iterable[int], tokens: Sequence[int]) -> None:
        """A step has begun to write so many tokens of each of these requests, whether or not it comes to its end."""
        for row, more in zip(rows, tokens, strict=True):
            self.reached[row] = max(self.reached[row], self.lengths[row] + more)

    def prefilled(self, rows: Iterable[int], held: Sequence[Sequence[int]]) -> None:
        """Add a chunk, of which the ranks hold so many tokens of each of these requests."""
        for row, more in zip(rows, held, strict=True):
            self._grow(row, sum(more))
            if self.counts is not None:
                self.counts[row] = [a + b for a, b in zip(self.counts[row], more, strict=True)]

    def cut(self, lengths: Sequence[int]) -> None:
        """Every request has at most so many tokens now."""
        if any(new < old for new, old in zip(lengths, self.lengths, strict=True)):
            self.counts = None
        self.lengths = [min(pair) for pair in zip(lengths, self.lengths, strict=True)]

    def uncertain(self) -> None:
        """The device has taken tokens back, the host does not know how many."""
        self.counts = None

    def reset(self, rows: Iterable[int]) -> None:
        """These requests are empty."""
        for row in rows:
            self.lengths[row] = self.reached[row] = 0
            if self.counts is not None:
                self.counts[row] = [0] * len(self.counts[row])

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Each target is what its source was."""
        for known in (self.lengths, self.reached, self.counts):
            if known is not None:
                copies = [known[row] for row in sources]
                for row, copy in zip(targets, copies, strict=True):
                    known[row] = list(copy) if isinstance(copy, list) else copy  # type: ignore[index]

    def _grow(self, row: int, tokens: int) -> None:
        self.lengths[row] += tokens
        self.reached[row] = max(self.reached[row], self.lengths[row])
