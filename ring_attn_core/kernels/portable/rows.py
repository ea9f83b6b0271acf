"""The keys that a query sees, and the tiles of keys or queries that a program must visit, in Triton.

    lo <= i - j <= hi            the band of a pair of runs, in local indices: query i and key j of their runs
    begin_i <= j < end_i         the keys of a run that query i sees by band, extent and run length: always one interval
    begin_j <= i < end_j         the queries of a run that may see key j by its key extent

A query that sees no key at all is *blank* (plan/ring.py).

Shapes     rows int32 [q_runs, k_runs, fields]: one ``runs.Row`` for each pair of runs; extents int32 [B, S, 2]: first and end of
           the key positions that a query may see; key_extents int32 [B, T, 2]: first and end of the query positions that may
           see a key
           query indices i and key indices j broadcast against each other, so the functions serve tiles of scores in both
           orientations, [queries, keys] and [keys, queries]
Tiles      a program visits the tiles ``first .. last - 1`` of a run; those in ``whole_first .. whole_last - 1`` need no mask
Units      local indices, except extents and ``*_start``, which are token positions
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...runs import Row

ROW_FIELDS = tl.constexpr(len(Row._fields))
Q_BASE = tl.constexpr(Row._fields.index("q_base"))
Q_LEN = tl.constexpr(Row._fields.index("q_len"))
K_LEN = tl.constexpr(Row._fields.index("k_len"))
NOTHING_BEGINS = tl.constexpr(2**30)


class Tiles(NamedTuple):
    """The tiles ``first .. last - 1`` of a run; of these tiles, ``whole_first .. whole_last - 1`` need no mask."""

    first: Any
    last: Any
    whole_first: Any
    whole_last: Any


@triton.jit
def load_row(rows_ptr, pair):
    """Load the ``runs.Row`` with index ``pair``, which describes a run of queries and a run of keys."""
    at = rows_ptr + pair * ROW_FIELDS
    return Row(
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
        tl.load(at + 8),
        tl.load(at + 9),
    )


@triton.jit
def keys_seen(i, extents_ptr, batch, q_tokens, row):
    """Return begin and end of the keys of a run that each query ``i`` sees, by the band and the query's extent (first, last).

        begin = max(0, i - hi, ceil((first - k_start) / stride))
        end   = min(k_len, i - lo + 1, ceil((last - k_start) / stride))        last: exclusive

    A query that is fully masked in this run, or is padding, has begin >= end.
    """
    first, last = None, None
    if extents_ptr is not None:
        at = extents_ptr + (batch.to(tl.int64) * q_tokens + row.q_base + i) * 2
        first = tl.load(at, mask=i < row.q_len, other=0)
        last = tl.load(at + 1, mask=i < row.q_len, other=0)
    return keys_between(i, first, last, row)


@triton.jit
def keys_between(i, first, last, row):
    """Return begin and end of the keys of a run that each query sees, by the formulas of ``keys_seen``; extents may be None."""
    begin = tl.maximum(i - row.hi, 0)
    end = tl.minimum(i - row.lo + 1, row.k_len)
    if first is not None:
        begin = tl.maximum(begin, (tl.maximum(first - row.k_start, 0) + row.stride - 1) // row.stride)
        end = tl.minimum(end, (tl.maximum(last - row.k_start, 0) + row.stride - 1) // row.stride)
    nothing = (i >= row.q_len) | (begin >= end)
    return tl.where(nothing, NOTHING_BEGINS, begin), tl.where(nothing, 0, end)


@triton.jit
def seen_from(j, key_extents_ptr, batch, k_tokens, row):
    """Return begin and end of the queries of a run that may see each key ``j``, by the key extent (first, last) of that key.

        begin = max(0, ceil((first - q_start) / stride))
        end   = min(q_len, ceil((last - q_start) / stride))        last: exclusive

    A key that no query may see, or that is padding, has begin >= end.
    """
    at = key_extents_ptr + (batch.to(tl.int64) * k_tokens + row.k_base + j) * 2
    first = tl.load(at, mask=j < row.k_len, other=0)
    last = tl.load(at + 1, mask=j < row.k_len, other=0)
    begin = (tl.maximum(first - row.q_start, 0) + row.stride - 1) // row.stride
    end = tl.minimum((tl.maximum(last - row.q_start, 0) + row.stride - 1) // row.stride, row.q_len)
    nothing = (j >= row.k_len) | (begin >= end)
    return tl.where(nothing, NOTHING_BEGINS, begin), tl.where(nothing, 0, end)


@triton.jit
def sees(j, run, tile, args):
    """Return the visibility mask of a tile's queries and keys ``j`` of a run, bool [queries, keys], without the key mask."""
    visible = (j[None, :] >= run.begin[:, None]) & (j[None, :] < run.end[:, None])
    if args.key_extents is not None:
        begin, end = seen_from(j, args.key_extents, tile.batch, args.T, run.row)
        visible &= (tile.i[:, None] >= begin[None, :]) & (tile.i[:, None] < end[None, :])
    return visible


@triton.jit
def some_query_sees(n0, run, tile, args, sizes: tl.constexpr):
    """Return whether key extents let some query of a tile see some key of the key tile that starts at key ``n0``."""
    begin, end = seen_from(n0 + tl.arange(0, sizes.BLOCK_K), args.key_extents, tile.batch, args.T, run.row)
    return tl.max(((begin < tile.m0 + sizes.BLOCK_Q) & (end > tile.m0)).to(tl.int32), 0) > 0


@triton.jit
def every_query_sees(n0, run, tile, args, sizes: tl.constexpr):
    """Return whether key extents let all queries of a tile see all keys of the key tile at ``n0``, both without padding."""
    begin, end = seen_from(n0 + tl.arange(0, sizes.BLOCK_K), args.key_extents, tile.batch, args.T, run.row)
    return tl.min(((begin <= tile.m0) & (end >= tile.m0 + sizes.BLOCK_Q)).to(tl.int32), 0) > 0


@triton.jit
def tiles_in_band(x0, x1, lo, hi, others, BLOCK: tl.constexpr):
    """Return the ``Tiles`` that hold the indices y with lo <= x - y <= hi for at least one index x. Index x lies in x0 .. x1 - 1,
    y in 0 .. others - 1. To find the query tiles of keys, let x be keys and y queries, and pass (-hi, -lo) for (lo, hi)."""
    some = (x0 < x1) & (lo <= hi)
    first = tl.maximum(x0 - hi, 0) // BLOCK
    last = (tl.minimum(x1 - lo, others) + BLOCK - 1) // BLOCK
    whole_first = (tl.maximum(x1 - 1 - hi, 0) + BLOCK - 1) // BLOCK
    whole_last = tl.minimum(x0 - lo + 1, others) // BLOCK
    return in_order(first, tl.where(some, last, first), whole_first, whole_last)


@triton.jit
def tiles_in_extents(tiles, begin, end, valid, BLOCK: tl.constexpr):
    """Return key ``tiles`` cut to the queries' intervals ``begin`` to ``end``; a tile inside those of all ``valid`` queries needs
    no mask. To cut query ``tiles``, pass the intervals of ``seen_from`` and the valid keys."""
    first = tl.maximum(tiles.first, tl.min(begin, 0) // BLOCK)
    last = tl.minimum(tiles.last, (tl.max(end, 0) + BLOCK - 1) // BLOCK)
    whole_first = tl.maximum(tiles.whole_first, (tl.max(tl.where(valid, begin, 0), 0) + BLOCK - 1) // BLOCK)
    whole_last = tl.minimum(tiles.whole_last, tl.min(tl.where(valid, end, NOTHING_BEGINS), 0) // BLOCK)
    return in_order(first, last, whole_first, whole_last)


@triton.jit
def in_order(first, last, whole_first, whole_last):
    """Return ``Tiles`` clamped to first <= whole_first <= whole_last <= last."""
    last = tl.maximum(last, first)
    whole_first = tl.minimum(tl.maximum(whole_first, first), last)
    whole_last = tl.minimum(tl.maximum(whole_last, whole_first), last)
    return Tiles(first, last, whole_first, whole_last)


@triton.jit
def count_partly_seen(tiles):
    """Return the number of tiles that need a mask."""
    return tiles.last - tiles.first - (tiles.whole_last - tiles.whole_first)


@triton.jit
def partly_seen(t, tiles):
    """Return the index of the t-th tile that needs a mask: those before the mask-free range, then those after it."""
    before = tiles.whole_first - tiles.first
    return tl.where(t < before, tiles.first + t, tiles.whole_last + t - before)
