"""Groups of ranks that exchange heads for tokens (DeepSpeed Ulysses, arXiv:2309.14509): their size and the heads of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from ..validation import in_words, is_integer


@dataclass(frozen=True, kw_only=True)
class Ulysses:
    """The strategy "ulysses" in groups of ``ranks`` consecutive ranks: heads are exchanged inside a group, and keys go round a
    ring of groups.

    ``ranks`` divides the ranks of the ring and the query heads. Raise ValueError if it is not an int of at least 1.
    """

    ranks: int

    def __post_init__(self) -> None:
        if not is_integer(self.ranks) or self.ranks < 1:
            raise ValueError(f"Ulysses(ranks=...) is the number of ranks in a group, at least 1, got {in_words(self.ranks)}")
        object.__setattr__(self, "ranks", int(self.ranks))

    def __str__(self) -> str:
        return f"Ulysses(ranks={self.ranks})"


class HeadShares(NamedTuple):
    """``heads`` query heads and ``kv_heads`` key heads, dealt to a group of ``ranks`` ranks in their order.

    Rank i of the group computes query heads ``i * heads / ranks`` and following, and gets the key heads that these read. A key
    head that several ranks read goes to each of them; one whose query heads are not dealt evenly goes to a rank more than once.
    """

    heads: int
    kv_heads: int
    ranks: int

    @property
    def q_local(self) -> int:
        """Return the number of query heads of a rank."""
        return self.heads // self.ranks

    @property
    def k_local(self) -> int:
        """Return the number of key heads that a rank gets: as many query heads read each of them."""
        return self.q_local // gcd(self.heads // self.kv_heads, self.q_local)

    @property
    def copies(self) -> int:
        """Return the number of times that each key head is sent."""
        return self.k_local * self.ranks // self.kv_heads
