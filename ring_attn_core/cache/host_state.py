"""The host's record of the number of tokens in a cache. Most steps update the record without reading the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .spec import CacheSpec


class HostState:
    """Upper bounds of the requests' ``lengths`` (too high after rejected tokens) and of the greatest ``reached``, and the exact
    ``counts`` [requests][ranks], None if unknown."""

    def __init__(self, spec: CacheSpec) -> None:
        self.know([[0] * spec.ranks] * spec.batch, [0] * spec.batch)

    def know(self, counts: Sequence[Sequence[int]], reached: Sequence[int]) -> None:
        """Set the exact token counts, and each request's greatest length so far (``reached``), as read from the device."""
        self.counts: list[list[int]] | None = [list(row) for row in counts]
        self.lengths = [sum(row) for row in counts]
        self.reached = list(reached)

    @property
    def empty(self) -> bool:
        return not any(self.lengths)

    def appended(self, rows: Iterable[int], tokens: int) -> None:
        """Increase length bounds by ``tokens``. ``counts`` become unknown: only the device learns which rank gets each token."""
        self.counts = None
        for row in rows:
            self._grow(row, tokens)

    def written(self, rows: Iterable[int], tokens: Sequence[int]) -> None:
        """Increase ``reached``, before a step, to the lengths that the requests may have after it, even if the step fails."""
        for row, more in zip(rows, tokens, strict=True):
            self.reached[row] = max(self.reached[row], self.lengths[row] + more)

    def prefilled(self, rows: Iterable[int], held: Sequence[Sequence[int]]) -> None:
        """Add a prefilled chunk to length bounds and counts. ``held`` [requests][ranks]: new tokens of the requests ``rows``."""
        for row, more in zip(rows, held, strict=True):
            self._grow(row, sum(more))
            if self.counts is not None:
                self.counts[row] = [a + b for a, b in zip(self.counts[row], more, strict=True)]

    def cut(self, lengths: Sequence[int]) -> None:
        """Lower length bounds to at most ``lengths``; if any becomes lower, mark ``counts`` as unknown."""
        if any(new < old for new, old in zip(lengths, self.lengths, strict=True)):
            self.counts = None
        self.lengths = [min(pair) for pair in zip(lengths, self.lengths, strict=True)]

    def reset(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.lengths[row] = self.reached[row] = 0
            if self.counts is not None:
                self.counts[row] = [0] * len(self.counts[row])

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the bounds and counts of request ``sources[i]`` to request ``targets[i]``, for each ``i``."""
        for known in (self.lengths, self.reached, self.counts):
            if known is not None:
                copies = [known[row] for row in sources]
                for row, copy in zip(targets, copies, strict=True):
                    known[row] = list(copy) if isinstance(copy, list) else copy  # type: ignore[index]

    def _grow(self, row: int, tokens: int) -> None:
        self.lengths[row] += tokens
        self.reached[row] = max(self.reached[row], self.lengths[row])
