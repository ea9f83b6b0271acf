"""Tile sizes and tile ranges: pure functions, tested without a device, the measured reason beside each number."""

from __future__ import annotations

from typing import Any

from ..runs import clamp


def blockwise_tiles(score_rows: int, q_slot: int, k_slot: int) -> tuple[int, int]:
    """(block_q, block_k) of the plain backends; ``score_rows`` is batch x query heads, the scores held at once per (i, j).

    The scores of a tile should stay in the caches between the passes over them. Forward and backward, ms of one AMD EPYC core at
    4,096 tokens, causal, dim 64, float32, with tiles of 128 / 256 / 512: 8 heads 785 / 785 / 867 in PyTorch, 769 / 753 / 1048 in
    JAX; 32 heads 3308 / 3444 / 5063 and 3347 / 3775 / 4576; 2 heads 227 / 198 / 217 and 149 / 151 / 209. Very many heads get
    shorter query tiles, so that the scores in flight stay below 16 Mi elements.
    """
    block = 256 if score_rows <= 16 else 128
    block_k = min(block, max(k_slot, 1))
    block_q = min(block, max(q_slot, 1))
    while block_q > 64 and score_rows * block_q * block_k > 1 << 24:
        block_q //= 2
    return block_q, block_k


def visible_tiles(m0: Any, m1: Any, lo: Any, hi: Any, begin: Any, end: Any, block_k: int) -> tuple[Any, Any]:
    """First and end (exclusive) key tile that queries ``m0 .. m1 - 1`` of a run meet; ints or traced ints.

    ``lo <= i - j <= hi`` is the band in local indices; ``begin .. end - 1`` are the keys of the run that an extent, or the run's
    length, leaves to them. First >= end where the queries see nothing.
    """
    first = clamp(m0 - hi, begin, end) // block_k
    last = -(-clamp(m1 - lo, begin, end) // block_k)
    something = (lo <= hi) & (m0 < m1) & (begin < end) & (m0 - hi < end) & (m1 - lo > begin)
    return first, last * something
