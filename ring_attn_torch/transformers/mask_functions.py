"""Patterns of the masks of transformers, and their recognition by samples of position pairs.

A model describes its mask as a function of positions. ``fits`` recognizes one of the patterns below. With 6 tokens (rows are
queries, columns keys, # may be attended), W = 2 and chunks of 3:

    full      causal    window    both      chunks
    ######    #.....    #.....    ###...    #.....
    ######    ##....    ##....    ####..    ##....
    ######    ###...    .##...    #####.    ###...
    ######    ####..    ..##..    .#####    ...#..
    ######    #####.    ...##.    ..####    ...##.
    ######    ######    ....##    ...###    ...###

A causal window of W includes the token itself: q - k < W. A two-sided window excludes it: |q - k| <= W.
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
    """A mask pattern: a band of keys. If ``chunk`` is not 0, a query sees only keys in its own chunk of ``chunk`` tokens."""

    band: Band
    chunk: int = 0

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        """Return True where a query at position ``q`` sees a key at position ``k``."""
        lo, hi = self.band.lo, self.band.hi
        inside = torch.ones_like(q - k, dtype=torch.bool)
        inside = inside if lo is None else inside & (q - k >= lo)
        inside = inside if hi is None else inside & (q - k <= hi)
        return inside & (q // self.chunk == k // self.chunk) if self.chunk else inside


def candidates(size: int | None, both_sides: bool, chunk_size: int | None) -> list[Pattern]:
    """Return the patterns of a mask, likeliest first. ``size``: tokens of its window, or chunk if it equals ``chunk_size``."""
    if size is None:
        return [Pattern(full() if both_sides else causal())]
    if both_sides:
        return [Pattern(sliding_window(size, after=size))]
    window, chunks = Pattern(sliding_window(size - 1)), Pattern(causal(), size)
    return [chunks, window] if size == chunk_size else [window, chunks]


def fits(pattern: Pattern, function: MaskFunction, size: int | None, tokens: int, device: torch.device, rows: int = 1) -> bool:
    """Return True if ``function`` equals ``pattern`` on sampled pairs of positions < ``tokens``, in the first ``rows`` sequences.

    The sample pairs each query with its neighbours, the first token and the tokens at the edge of a window of ``size``, to
    detect documents, blocks and prefixes. It pairs each query with ``_spread`` keys, to detect holes. It also has all pairs among
    the tokens near the first three multiples of ``size`` and near the first and last token, to detect windows and chunks.
    """
    every = torch.arange(tokens, device=device)
    near = torch.cat([every - 1, every, every + 1, every * 0, every - (size or 1), every - (size or 1) - 1])
    near = torch.cat([near, *_spread(every, tokens)])
    edge = torch.arange(-2, 3)
    around = torch.cat([edge, *(edge + i * (size or 0) for i in (1, 2, 3)), edge + tokens - 1]).clamp(0, tokens - 1).unique()
    around = around.to(device)
    q = torch.cat([every.repeat(len(near) // tokens), around.repeat_interleave(len(around))]).expand(rows, -1)
    k = torch.cat([near.clamp(0, tokens - 1), around.repeat(len(around))]).expand(rows, -1)
    b = torch.arange(rows, device=device)[:, None].expand_as(q)
    return bool((function(b, torch.zeros_like(b), q, k) == pattern.visible(q, k)).all())


def _spread(q: Tensor, tokens: int) -> list[Tensor]:
    """Return 8 keys for each query ``q``, spread evenly: any run of an eighth of the tokens or more contains one of the 8."""
    return [(q + i * tokens // 8) % tokens for i in range(8)]


def intervals(function: MaskFunction, batch: int, tokens: int, device: torch.device) -> Tensor | None:
    """Return each query's interval of visible keys, int32 [batch, tokens, 2], or None if some query has none that contains it.

    Bisection finds its ends; then the keys beside and halfway to each end and ``_spread`` keys are checked. A hole of less
    than an eighth of the tokens may not be found. All global tokens are evaluated, so only rings of one rank call this.
    """
    b = torch.arange(batch, device=device)[:, None].expand(batch, tokens)
    q = torch.arange(tokens, device=device).expand(batch, tokens)
    sees = lambda k: function(b, torch.zeros_like(b), q, k.clamp(0, tokens - 1)) & (k >= 0) & (k < tokens)
    if not bool(sees(q).all()):
        return None
    first, below = q.clone(), torch.full_like(q, -1)  # first is visible, below is not
    end, last = torch.full_like(q, tokens), q.clone()  # last is visible, end is not
    for _ in range(tokens.bit_length() + 1):
        middle = (first + below) // 2
        inside, open_ = sees(middle), first - below > 1
        first, below = torch.where(open_ & inside, middle, first), torch.where(open_ & ~inside, middle, below)
        middle = (last + end) // 2
        inside, open_ = sees(middle), end - last > 1
        last, end = torch.where(open_ & inside, middle, last), torch.where(open_ & ~inside, middle, end)
    whole = sees((first + q) // 2) & sees((last + q) // 2) & ~sees(first - 1) & ~sees(end)
    for k in _spread(q, tokens):
        whole &= sees(k) == ((first <= k) & (k < end))
    return torch.stack([first, end], -1).int() if bool(whole.all()) else None
