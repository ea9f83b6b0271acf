"""The problem and its predicted cost."""

from __future__ import annotations

from typing import NamedTuple

SHORTEST = 2048
"""Tokens of the shortest segments, which are dense."""


class Problem(NamedTuple):
    """The measured problem. ``tokens``: of the global sequence. ``steps``, ``exact_steps``: timed steps, dilated and exact."""

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
        """Return the number of visible pairs per head of dilated attention, causal among the kept tokens of each segment."""
        kept = [(self.tokens / r, min(w, self.tokens) / r) for w, r in zip(self.segments, self.dilations, strict=True)]
        return sum(tokens * (keys + 1) / 2 for tokens, keys in kept)

    def flops(self, pairs: float) -> float:
        """Return the operations of forward and backward: two and five products per pair and head."""
        return 7 * 2 * self.head_dim * self.heads * pairs

    @property
    def moved(self) -> float:
        """Return the bytes that dilated attention reads and writes outside its kernels, to fold and unfold the kept tokens.

        Accesses per kept token, head and dim, in elements of the dtype. Forward: q, k, v are copied (6), out is weighted and
        added to the float32 sum (1 + 2 x 2), which is rounded at the end (2 + 1). Backward: dout is copied and read with out
        (1 + 1 + 2), dq, dk, dv are accumulated (3 x 3). The first pattern, of dilation 1, copies nothing.
        """
        number = self.tokens * self.heads * self.head_dim * (2 if self.dtype == "bfloat16" else 4)
        sparse = sum(1 / r for r in self.dilations[1:])
        return number * ((5 + 4 + 9) * (1 + sparse) + 6 * sparse + 3)
