"""Groups of ranks that exchange heads for tokens (DeepSpeed Ulysses, arXiv:2309.14509): group size, and heads per rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from ..validation import in_words, is_integer


@dataclass(frozen=True, kw_only=True)
class Ulysses:
    """The strategy "ulysses" in groups of ``ranks`` consecutive ranks.

    Ranks exchange heads for tokens inside a group, and keys go round a ring of groups.

    ``ranks`` must divide the ring's number of ranks and the number of query heads. Raise ValueError if ``ranks`` is not an int of
    at least 1.
    """

    ranks: int

    def __post_init__(self) -> None:
        if not is_integer(self.ranks) or self.ranks < 1:
            raise ValueError(f"Ulysses(ranks=...) is the number of ranks in a group, at least 1, got {in_words(self.ranks)}")
        object.__setattr__(self, "ranks", int(self.ranks))

    def __str__(self) -> str:
        return f"Ulysses(ranks={self.ranks})"


class HeadSplit(NamedTuple):
    """The split of query heads and key heads among the ``ranks`` ranks of a Ulysses group.

    Each received copy of a key head serves gcd(heads / kv_heads, heads / ranks) query heads; a rank may get several copies of
    one. Example: 6 query heads, 3 key heads, 2 ranks. Query heads 0, 1 read key head 0, and so on. Rank 0 computes query heads 0,
    1, 2 and receives key heads 0, 0, 1; rank 1 computes 3, 4, 5 and receives 1, 2, 2. ``k_local`` is 3 and ``copies`` is 2.
    """

    heads: int
    kv_heads: int
    ranks: int

    @property
    def q_local(self) -> int:
        return self.heads // self.ranks

    @property
    def k_local(self) -> int:
        """Return the number of key heads that a rank gets, copies included, each read by equally many of its query heads."""
        return self.q_local // gcd(self.heads // self.kv_heads, self.q_local)

    @property
    def copies(self) -> int:
        """Return how many copies of a key head the ranks of a group receive in total, the same number for each key head."""
        return self.k_local * self.ranks // self.kv_heads
