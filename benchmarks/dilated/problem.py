"""The problem and its predicted cost."""

from __future__ import annotations

from typing import NamedTuple

SHORTEST = 2048
"""Tokens of the shortest segments, which are dense."""


class Problem(NamedTuple):
    """The measured problem. ``tokens``: of the global sequence. ``steps``, ``exact_steps``: timed steps of each attention."""

    tokens: int
    heads: int
    head_dim: int
    dtype: str
    steps: int
    exact_steps: int

    @property
    def segments(self) -> tuple[int, ...]:
        """Return segments from the shortest to the whole sequence, each twice as long as the one before."""
        lengths = []
        while not lengths or lengths[-1] < self.tokens:
            lengths.append(SHORTEST << len(lengths))
        return tuple(lengths)

    @property
    def dilations(self) -> tuple[int, ...]:
        """Return the dilations, in proportion to the segments."""
        return tuple(segment // SHORTEST for segment in self.segments)

    @property
    def exact_pairs(self) -> float:
        """Return the number of (query, key) pairs per head of causal attention."""
        return self.tokens * (self.tokens + 1) / 2

    @property
    def pairs(self) -> float:
        """Return the number of pairs per head of dilated attention: each segment is a triangle of the tokens that it keeps."""
        kept = [(self.tokens / r, min(w, self.tokens) / r) for w, r in zip(self.segments, self.dilations, strict=True)]
        return sum(tokens * (keys + 1) / 2 for tokens, keys in kept)

    def flops(self, pairs: float) -> float:
        """Return the operations of forward and backward: two and five products per pair and head."""
        return 7 * 2 * self.head_dim * self.heads * pairs

    @property
    def moved(self) -> float:
        """Return the bytes that dilated attention moves outside its kernels: the kept tokens of each pattern, in and out.

        Accesses per kept token, head and dim, in numbers of the dtype. Forward: q, k, v are copied (6), out is weighted and added
        to the float32 sum (1 + 2 x 2), which is rounded at the end (2 + 1). Backward: dout is copied and read with out
        (1 + 1 + 2), dq, dk, dv are accumulated (3 x 3). The first pattern, of dilation 1, copies nothing.
        """
        number = self.tokens * self.heads * self.head_dim * (2 if self.dtype == "bfloat16" else 4)
        sparse = sum(1 / r for r in self.dilations[1:])
        return number * ((5 + 4 + 9) * (1 + sparse) + 6 * sparse + 3)
