"""The row of a pair of runs: which keys a query sees, and which tiles the band and the extents touch.

Index tensors come broadcast, ``i`` of queries and ``j`` of keys against each other, so that every function here serves tiles of
scores in either orientation, [queries, keys] and [keys, queries].
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

ROW_FIELDS = tl.constexpr(10)
NOTHING_BEGINS = tl.constexpr(2**30)


@triton.jit
def load_row(rows_ptr, pair):
    """lo, hi, q_base, q_len, q_start, k_base, k_len, k_start, stride of a pair of runs: the fields of ``runs.Row``."""
    at = rows_ptr + pair * ROW_FIELDS
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
        tl.load(at + 8),
    )


@triton.jit
def keys_seen(i, extents_ptr, batch, q_tokens, lo, hi, q_base, q_len, k_len, k_start, stride):
    """begin, end of the keys j of a run that each query i of a run sees: band, extent and length make one interval.

    begin = max(0, i - hi, ceil((first - k_start) / stride)); end = min(k_len, i - lo + 1, ceil((end - k_start) / stride)).
    A query that sees nothing, or is padding, has begin >= end.
    """
    begin = tl.maximum(i - hi, 0)
    end = tl.minimum(i - lo + 1, k_len)
    if extents_ptr is not None:
        at = extents_ptr + (batch.to(tl.int64) * q_tokens + q_base + i) * 2
        first = tl.load(at, mask=i < q_len, other=0)
        last = tl.load(at + 1, mask=i < q_len, other=0)
        begin = tl.maximum(begin, (tl.maximum(first - k_start, 0) + stride - 1) // stride)
        end = tl.minimum(end, (tl.maximum(last - k_start, 0) + stride - 1) // stride)
    nothing = (i >= q_len) | (begin >= end)
    return tl.where(nothing, NOTHING_BEGINS, begin), tl.where(nothing, 0, end)


@triton.jit
def tiles_in_band(x0, x1, lo, hi, others, BLOCK: tl.constexpr):
    """Tiles of y in 0 .. others - 1 that x0 .. x1 - 1 meet by lo <= x - y <= hi: first, last, whole_first, whole_last.

    Ends are exclusive. The whole ones are those of which every x meets every y. x are queries and y keys, or with (-hi, -lo) the
    other way round.
    """
    some = (x0 < x1) & (lo <= hi)
    first = tl.maximum(x0 - hi, 0) // BLOCK
    last = (tl.minimum(x1 - lo, others) + BLOCK - 1) // BLOCK
    whole_first = (tl.maximum(x1 - 1 - hi, 0) + BLOCK - 1) // BLOCK
    whole_last = tl.minimum(x0 - lo + 1, others) // BLOCK
    return in_order(first, tl.where(some, last, first), whole_first, whole_last)


@triton.jit
def tiles_in_extents(first, last, whole_first, whole_last, begin, end, valid, BLOCK: tl.constexpr):
    """The part of such a range of key tiles that the intervals of a tile of queries meet, and that all of them cover."""
    first = tl.maximum(first, tl.min(begin, 0) // BLOCK)
    last = tl.minimum(last, (tl.max(end, 0) + BLOCK - 1) // BLOCK)
    whole_first = tl.maximum(whole_first, (tl.max(tl.where(valid, begin, 0), 0) + BLOCK - 1) // BLOCK)
    whole_last = tl.minimum(whole_last, tl.min(tl.where(valid, end, NOTHING_BEGINS), 0) // BLOCK)
    return in_order(first, last, whole_first, whole_last)


@triton.jit
def in_order(first, last, whole_first, whole_last):
    """The same with first <= whole_first <= whole_last <= last."""
    last = tl.maximum(last, first)
    whole_first = tl.minimum(tl.maximum(whole_first, first), last)
    whole_last = tl.minimum(tl.maximum(whole_last, whole_first), last)
    return first, last, whole_first, whole_last


@triton.jit
def partly_seen(t, first, whole_first, whole_last):
    """The t-th tile of those that need a mask: the ones before the whole tiles, then the ones behind them."""
    before = whole_first - first
    return tl.where(t < before, first + t, whole_last + t - before)
