"""The record of a balanced layout: each rank's runs of consecutive token positions, of any number and length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any

from ..layouts import check_length
from ..records import hash_once
from ..runs import Run
from ..validation import in_words
from .documents import unite


@hash_once
@dataclass(frozen=True)
class BalancedLayout:
    """The token positions of each rank as plain data. :func:`balanced_layout` computes them.

    ``runs``: for each rank its runs of consecutive positions as (start, length), in the order of its shard; the lengths add up
    to ``seq_local``. ``length``: number of tokens without padding; positions from ``length`` on are padding. ``documents``: the
    lengths of the documents that the layout was made for, one tuple for each batch row; empty if unknown. ``tree``: True if it
    was made for prefix trees.
    """

    runs: tuple[tuple[tuple[int, int], ...], ...]
    length: int
    documents: tuple[tuple[int, ...], ...] = ()
    tree: bool = False

    def __post_init__(self) -> None:
        check_length(self.length)
        for x in (x for rank in self.runs for run in rank for x in run):
            if type(x) is not int:
                raise ValueError(f"the runs of a BalancedLayout are (start, length), two ints, got {in_words(x)}")
        counts = {sum(length for _, length in rank) for rank in self.runs}
        ends = 0
        for start, length in sorted(run for rank in self.runs for run in rank):
            if start != ends or length < 1:
                raise ValueError(
                    f"the runs of a BalancedLayout hold each position once, got one of {length} tokens at {start} after those up "
                    f"to {ends}: make it with balanced_layout"
                )
            ends = start + length
        if len(counts) != 1 or self.length > ends:
            raise ValueError(
                f"each rank of a BalancedLayout holds the same number of tokens, together at least length={self.length}, got "
                f"{sorted(counts)} on {len(self.runs)} ranks: make it with balanced_layout"
            )

    def __str__(self) -> str:
        """Return the number of ranks, the length and a digest of runs and documents as a text, to compare layouts by it."""
        digest = sha256(repr((self.runs, self.documents)).encode()).hexdigest()[:16]
        return f"balanced over {self.ranks} ranks, length {self.length}, runs {digest}"

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.runs)

    @cached_property
    def seq_local(self) -> int:
        """Return the number of tokens of each rank, padding included."""
        return sum(length for _, length in self.runs[0])

    @property
    def ascends(self) -> bool:
        """Return whether the runs of each rank are in order of position; True for every result of ``balanced_layout``."""
        return all(a < b for rank in self.runs for a, b in pairwise(rank))

    @property
    def most_runs(self) -> int:
        return max(map(len, self.runs))

    def held(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of a rank, without padding."""
        kept = (Run(start, length).before(self.length) for start, length in self.runs[rank])
        return tuple(run for run in kept if run.length)

    def joined(self, shards: int) -> BalancedLayout:
        """Return a layout in which each group of ``shards`` consecutive ranks is one rank, with its tokens by position."""
        groups = []
        for first in range(0, self.ranks, shards):
            spans = unite((start, start + length) for rank in self.runs[first : first + shards] for start, length in rank)
            groups.append(tuple((start, end - start) for start, end in spans))
        return BalancedLayout(tuple(groups), self.length)

    def stretches(self, shards: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the slices (first, length) of each group's concatenated shards that sort its tokens by position."""
        groups = []
        for first in range(0, self.ranks, shards):
            runs = [run for rank in self.runs[first : first + shards] for run in rank]
            bases = accumulate((length for _, length in runs), initial=0)
            groups.append(tuple((base, length) for (_, length), base in sorted(zip(runs, bases, strict=False))))
        return tuple(groups)

    def padded_runs(self, rank: int) -> tuple[tuple[int, int, int, int], ...]:
        """Return a rank's runs (base, length without padding, start, stride 1), and empty ones up to ``most_runs``."""
        return self._padded_runs[rank]

    @cached_property
    def _padded_runs(self) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
        found, most = [], self.most_runs
        for runs in self.runs:
            bases = accumulate((length for _, length in runs), initial=0)
            based = zip(bases, runs, strict=False)
            own = [(base, max(min(length, self.length - start), 0), start, 1) for base, (start, length) in based]
            found.append((*own, *[(0, 0, 0, 1)] * (most - len(own))))
        return tuple(found)

    def check(self, ranks: object, length: object) -> None:
        """Raise ValueError if the number of ranks of this layout is not ``ranks``, or its length is not ``length``."""
        check_layout(self, ranks, length)

    def positions(self, rank: int) -> list[int]:
        """Return the global position of each token of a rank, in shard order; padding has positions >= length."""
        return [position for start, length in self.runs[rank] for position in range(start, start + length)]


def check_layout(layout: Any, ranks: object, length: object) -> None:
    """Raise ValueError if the number of ranks of ``layout`` is not ``ranks``, or its length is not ``length``."""
    if ranks != layout.ranks or length != layout.length:
        raise ValueError(
            f"this layout deals {layout.length} tokens to {layout.ranks} ranks, got {in_words(length)} tokens and "
            f"{in_words(ranks)} ranks: pass the layout that was made for these documents, the .layout of their shard"
        )
