"""The mask patterns of transformers' models, and the recognition of a mask function of transformers as one of them.

With 6 tokens (rows are queries, columns keys, # may be attended), W = 2 and chunks of 3:

    full      causal    window    both      chunks
    ######    #.....    #.....    ###...    #.....
    ######    ##....    ##....    ####..    ##....
    ######    ###...    .##...    #####.    ###...
    ######    ####..    ..##..    .#####    ...#..
    ######    #####.    ...##.    ..####    ...##.
    ######    ######    ....##    ...###    ...###

A causal window of W counts the token itself, q - k < W; a window to both sides does not, |q - k| <= W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn_core.masks import causal, full, sliding_window
from ring_attn_core.runs import Band

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A mask function of transformers: (batch row, head, q_pos, k_pos) -> bool, broadcast."""


class Pattern(NamedTuple):
    """A band, and causal chunks of ``chunk`` tokens if that is not 0."""

    band: Band
    chunk: int = 0

    def sees(self, q: Tensor, k: Tensor) -> Tensor:
        """Return True where a query at position ``q`` sees a key at ``k``."""
        lo, hi = self.band.lo, self.band.hi
        seen = torch.ones_like(q - k, dtype=torch.bool)
        seen = seen if lo is None else seen & (q - k >= lo)
        seen = seen if hi is None else seen & (q - k <= hi)
        return seen & (q // self.chunk == k // self.chunk) if self.chunk else seen


class NoWindow(NamedTuple):
    """The mask of layers with a sliding window of ``size`` < 1, which models also request without any such layer."""

    size: int


def candidates(size: int | None, both_sides: bool, chunk_size: int | None) -> list[Pattern]:
    """Return the patterns that a mask requested with ``local_size=size`` may have, the likeliest first."""
    if size is None:
        return [Pattern(full() if both_sides else causal())]
    if both_sides:
        return [Pattern(sliding_window(size, after=size))]
    window, chunks = Pattern(sliding_window(size - 1)), Pattern(causal(), size)
    return [chunks, window] if size == chunk_size else [window, chunks]


def fits(pattern: Pattern, function: MaskFunction, size: int | None, tokens: int, device: torch.device) -> bool:
    """Return True if ``function`` equals ``pattern`` on a sample of pairs among ``tokens`` positions.

    The sample has every query with the tokens next to it, the first token and those at the edge of a window of ``size``, which
    detects documents, blocks and prefixes; and all pairs around the first edges of windows and chunks of ``size``.
    """
    every = torch.arange(tokens, device=device)
    near = torch.cat([every - 1, every, every + 1, every * 0, every - (size or 1), every - (size or 1) - 1])
    q, k = every.repeat(6), near.clamp(0, tokens - 1)
    edge = torch.arange(-2, 3)
    around = torch.cat([edge, *(edge + i * (size or 0) for i in (1, 2, 3)), edge + tokens - 1]).clamp(0, tokens - 1).unique()
    around = around.to(device)
    q = torch.cat([q, around.repeat_interleave(len(around))])
    k = torch.cat([k, around.repeat(len(around))])
    nought = torch.zeros_like(q)
    return bool((function(nought, nought, q, k) == pattern.sees(q, k)).all())


def intervals(function: MaskFunction, batch: int, tokens: int, device: torch.device) -> Tensor | None:
    """Return int32 [batch, tokens, 2], the interval of keys that each query sees; None if keys are not one interval around it.

    The ends are found by bisection, and only the ends and the middles are checked. All positions are one device's, so this is for
    a ring of one.
    """
    b, q = (
        torch.arange(batch, device=device)[:, None].expand(batch, tokens),
        torch.arange(tokens, device=device).expand(batch, tokens),
    )
    sees = lambda k: function(b, torch.zeros_like(b), q, k.clamp(0, tokens - 1)) & (k >= 0) & (k < tokens)
    if not bool(sees(q).all()):
        return None
    first, below = q.clone(), torch.full_like(q, -1)  # first is seen, below is not
    end, last = torch.full_like(q, tokens), q.clone()  # last is seen, end is not
    for _ in range(tokens.bit_length() + 1):
        middle = (first + below) // 2
        seen, open_ = sees(middle), first - below > 1
        first, below = torch.where(open_ & seen, middle, first), torch.where(open_ & ~seen, middle, below)
        middle = (last + end) // 2
        seen, open_ = sees(middle), end - last > 1
        last, end = torch.where(open_ & seen, middle, last), torch.where(open_ & ~seen, middle, end)
    whole = sees((first + q) // 2) & sees((last + q) // 2) & ~sees(first - 1) & ~sees(end)
    return torch.stack([first, end], -1).int() if bool(whole.all()) else None
