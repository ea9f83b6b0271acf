"""The blocks into which tests of attend_block split a sequence, and their cases."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ring_attn_core import Run, causal, sliding_window

from .cases import Case


@dataclass(frozen=True)
class Cut:
    """A split into ``blocks`` stretches (stride 1), or into that many interleaved runs."""

    blocks: int
    interleaved: bool

    def __str__(self) -> str:
        return f"{self.blocks} {'interleaved' if self.interleaved else 'stretches'}"

    def runs(self, tokens: int) -> list[Run]:
        if self.interleaved:
            return [Run(i, len(range(i, tokens, self.blocks)), self.blocks) for i in range(self.blocks)]
        edges = [tokens * i // self.blocks for i in range(self.blocks + 1)]
        return [Run(a, b - a) for a, b in pairwise(edges)]


def cuts() -> list[Cut]:
    return [Cut(1, False), Cut(2, False), Cut(2, True)]


CASES = [
    Case(extents="documents", key_mask="random", softcap=2.0, sinks=True, alibi=True, dropout_rate=0.3),
    Case(extents="any", key_mask="none", sinks=True, mask=causal(offset=24), kv_length=61, v_dim=5),
    Case(
        extents="any", key_mask="random", sinks=True, mask=sliding_window(9, 3), dtype="bfloat16", softcap=2.0, dropout_rate=0.3
    ),
    Case(key_extents="tree", sinks=True),
]
"""Every feature at once, cross-attention, half precision."""
