"""Lists of the tiles that each program of a kernel must visit under extents, computed once before its launch, in Triton.

    key_tiles      int32 [B, q tiles, k_runs, 4]    first, last, whole_first, whole_last: the ``rows.Tiles`` of a query tile
    query_tiles    int32 [B, k tiles, q_runs, 4]    first, last, count, 0: the query tiles that a key tile visits; if there are
                                                    gaps among first .. last - 1, count is less than last - first
    tile_order     int32 [B, q tiles]               the query tiles, those that visit the most key tiles first
    key_ranges     int32 [B, k_runs, 2, S]          begin and end (exclusive) of the keys that a query sees by band and extent
    not_finite     int32 [B, G, spans]              1 if k (in the forward: v) has an infinite or NaN element in a span of 64 keys

Key extents leave gaps among the key tiles of a query tile, so the list of key tiles consists of intervals:

    key_bounds     int32 [B, k tiles, 4]            the bounds of a key tile's extents, as in backward_sums.py
    intervals      int32 [B, q tiles, k_runs, 32]   numbers of tiles, of tiles that need a mask and of intervals, a 0,
                                                    then first and end (exclusive) of each interval

Intervals of tiles that need a mask come first. If a query tile has more than INTERVALS intervals in a run of keys, a single
interval from its first key tile to its last replaces them, and all tiles of that interval count as tiles that need a mask.

Shapes     rows int32 [q_runs, k_runs, fields], extents int32 [B, S, 2], bounds int32 [B, q tiles, 4] (backward_sums.py); spans:
           number of spans of 64 keys in T keys, with T rounded up to a multiple of MASK_BLOCK, as in loads.py
Program    one (q tile, run of keys, batch row) or (k tile, run of queries, batch row); ``tile_order``: (q tile, batch row);
           ``not_finite``: (span, head, batch row)
Units      local indices in a run, of tiles or (key_ranges) of keys; bounds and key_bounds are token positions
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import extent_launches
from .loads import SPAN, SPANS
from .rows import keys_seen, load_row, tiles_in_band, tiles_in_extents

SCAN = tl.constexpr(128)
"""Number of tiles whose bounds are read at a time."""

HEADER = tl.constexpr(extent_launches.HEADER)
INTERVALS = tl.constexpr(extent_launches.INTERVALS)
LIST = tl.constexpr(extent_launches.HEADER + 2 * extent_launches.INTERVALS)


@triton.jit
def key_tiles(
    rows_ptr, extents_ptr, key_tiles_ptr, S,
    Q_RUNS: tl.constexpr, K_RUNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Find the key tiles that one query tile visits in one run of keys. Store them as the four numbers of ``rows.Tiles``."""
    tiles_of_run = tl.cdiv(S // Q_RUNS, BLOCK_Q)
    program = tl.program_id(0)
    tile = program // K_RUNS % (Q_RUNS * tiles_of_run)
    batch = program // K_RUNS // (Q_RUNS * tiles_of_run)
    row = load_row(rows_ptr, tile // tiles_of_run * K_RUNS + program % K_RUNS)
    m0 = tile % tiles_of_run * BLOCK_Q
    i = m0 + tl.arange(0, BLOCK_Q)
    tiles = tiles_in_band(m0, tl.minimum(m0 + BLOCK_Q, row.q_len), row.lo, row.hi, row.k_len, BLOCK_K)
    begin, end = keys_seen(i, extents_ptr, batch, S, row)
    tiles = tiles_in_extents(tiles, begin, end, i < row.q_len, BLOCK_K)
    at = key_tiles_ptr + program.to(tl.int64) * 4
    tl.store(at, tiles.first)
    tl.store(at + 1, tiles.last)
    tl.store(at + 2, tiles.whole_first)
    tl.store(at + 3, tiles.whole_last)


@triton.jit
def tile_order(key_tiles_ptr, intervals_ptr, tile_order_ptr, Q_TILES, K_RUNS: tl.constexpr):
    """Store the index of a query tile behind tiles that visit more key tiles, or equally many at a higher index."""
    program = tl.program_id(0)
    tile, first = program % Q_TILES, program // Q_TILES * Q_TILES
    own = count_visited(key_tiles_ptr, intervals_ptr, program + tl.zeros([1], tl.int32), K_RUNS)
    place = tl.zeros([1], tl.int32)
    for start in range(0, Q_TILES, SCAN):
        each = start + tl.arange(0, SCAN)
        count = count_visited(key_tiles_ptr, intervals_ptr, first + tl.minimum(each, Q_TILES - 1), K_RUNS)
        before = (count > own) | ((count == own) & (each > tile))
        place += tl.sum((before & (each < Q_TILES)).to(tl.int32), 0)
    tl.store(tile_order_ptr + first + place, tile)


@triton.jit
def count_visited(key_tiles_ptr, intervals_ptr, q_tile, K_RUNS: tl.constexpr):
    """Return the number of key tiles that each query tile visits in all runs of keys."""
    count = tl.zeros_like(q_tile)
    for run in tl.static_range(K_RUNS):
        pair = q_tile.to(tl.int64) * K_RUNS + run
        if intervals_ptr is not None:
            count += tl.load(intervals_ptr + pair * LIST)
        else:
            count += tl.load(key_tiles_ptr + pair * 4 + 1) - tl.load(key_tiles_ptr + pair * 4)
    return count


@triton.jit
def key_ranges(rows_ptr, extents_ptr, key_ranges_ptr, S, Q_RUNS: tl.constexpr, K_RUNS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Store the range of keys of a run that each query of a tile sees, so that other kernels need no division by strides."""
    q_slot = S // Q_RUNS
    tiles_of_run = tl.cdiv(q_slot, BLOCK_Q)
    program = tl.program_id(0)
    tile = program // K_RUNS % (Q_RUNS * tiles_of_run)
    batch = program // K_RUNS // (Q_RUNS * tiles_of_run)
    q_run, k_run = tile // tiles_of_run, program % K_RUNS
    i = tile % tiles_of_run * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = load_row(rows_ptr, q_run * K_RUNS + k_run)
    begin, end = keys_seen(i, extents_ptr, batch, S, row)
    at = key_ranges_ptr + (batch * K_RUNS + k_run).to(tl.int64) * 2 * S + row.q_base + i
    tl.store(at, begin, mask=i < q_slot)
    tl.store(at + S, end, mask=i < q_slot)


@triton.jit
def intervals(
    rows_ptr, extents_ptr, key_bounds_ptr, intervals_ptr, S, T,
    Q_RUNS: tl.constexpr, K_RUNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Store the intervals of key tiles that a query tile visits; WHOLE: those that need no mask in separate intervals."""
    q_tiles = tl.cdiv(S // Q_RUNS, BLOCK_Q)
    k_tiles = tl.cdiv(T // K_RUNS, BLOCK_K)
    program = tl.program_id(0)
    k_run = program % K_RUNS
    tile = program // K_RUNS % (Q_RUNS * q_tiles)
    batch = program // K_RUNS // (Q_RUNS * q_tiles)
    row = load_row(rows_ptr, tile // q_tiles * K_RUNS + k_run)
    m0 = tile % q_tiles * BLOCK_Q
    m1 = tl.minimum(m0 + BLOCK_Q, row.q_len)
    m1 = tl.where(m0 < row.k_len + row.hi, m1, m0)  # queries from there on have only padding in their band
    tiles = tiles_in_band(m0, m1, row.lo, row.hi, row.k_len, BLOCK_K)
    if extents_ptr is not None:
        i = m0 + tl.arange(0, BLOCK_Q)
        begin, end = keys_seen(i, extents_ptr, batch, S, row)
        tiles = tiles_in_extents(tiles, begin, end, i < row.q_len, BLOCK_K)
    bounds = key_bounds_ptr + (batch * K_RUNS + k_run).to(tl.int64) * k_tiles * 4
    first, last = row.q_start + row.stride * m0, row.q_start + row.stride * (m1 - 1)
    to = intervals_ptr + program.to(tl.int64) * LIST
    count, partly, begun, ended = 0, 0, 0, 0
    lowest, highest = tiles.last, tiles.first
    for part in tl.static_range(2 if WHOLE else 1):
        for start in range(tiles.first, tiles.last, SCAN):
            each = start + tl.arange(0, SCAN)
            here = belongs(each, part, tiles, bounds, first, last, WHOLE)
            begins = here & ~belongs(each - 1, part, tiles, bounds, first, last, WHOLE)
            ends = here & ~belongs(each + 1, part, tiles, bounds, first, last, WHOLE)
            number = begun + tl.cumsum(begins.to(tl.int32), 0) - 1
            tl.store(to + HEADER + 2 * number, each, mask=begins & (number < INTERVALS))
            number = ended + tl.cumsum(ends.to(tl.int32), 0) - 1
            tl.store(to + HEADER + 2 * number + 1, each + 1, mask=ends & (number < INTERVALS))
            begun += tl.sum(begins.to(tl.int32), 0)
            ended += tl.sum(ends.to(tl.int32), 0)
            count += tl.sum(here.to(tl.int32), 0)
            lowest = tl.minimum(lowest, tl.min(tl.where(here, each, tiles.last), 0))
            highest = tl.maximum(highest, tl.max(tl.where(here, each + 1, tiles.first), 0))
        if part == 0:
            partly = count
    if begun > INTERVALS:
        count, partly, begun = highest - lowest, highest - lowest, 1
        tl.debug_barrier()  # orders the stores above before those below, which overwrite them
        tl.store(to + HEADER, lowest)
        tl.store(to + HEADER + 1, highest)
    tl.store(to, count)
    tl.store(to + 1, partly)
    tl.store(to + 2, begun)
    tl.store(to + 3, 0)


@triton.jit
def belongs(tile, part, tiles, bounds, first, last, WHOLE: tl.constexpr):
    """Return the mask over key tiles that are in ``part`` and that a query at positions ``first`` to ``last`` may see. Part 0
    holds the key tiles that need a mask (without WHOLE: all), part 1 those that need none."""
    inside = (tile >= tiles.first) & (tile < tiles.last)
    at = bounds + tile * 4
    some = inside & (tl.load(at, mask=inside, other=0) <= last) & (tl.load(at + 1, mask=inside, other=0) > first)
    if WHOLE:
        whole = some & (tile >= tiles.whole_first) & (tile < tiles.whole_last)
        whole &= (tl.load(at + 2, mask=whole, other=0) <= first) & (tl.load(at + 3, mask=whole, other=0) > last)
        some = (some & ~whole) if part == 0 else whole
    return some


@triton.jit
def lies_in(tile, list_ptr, inside):
    """Return whether each list of intervals at ``list_ptr`` contains key tile ``tile``; False outside the mask ``inside``."""
    found = inside & False
    some = tl.load(list_ptr + 2, mask=inside, other=0)
    for each in range(INTERVALS):
        here = inside & (each < some)
        first = tl.load(list_ptr + HEADER + 2 * each, mask=here, other=0)
        end = tl.load(list_ptr + HEADER + 2 * each + 1, mask=here, other=0)
        found |= (first <= tile) & (tile < end)
    return found


@triton.jit
def query_tiles(
    rows_ptr, bounds_ptr, intervals_ptr, query_tiles_ptr, S, T,
    Q_RUNS: tl.constexpr, K_RUNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Find the query tiles in the band that, by their intervals or bounds, see a key tile. Store first, last, count and 0."""
    q_tiles = tl.cdiv(S // Q_RUNS, BLOCK_Q)
    k_tiles = tl.cdiv(T // K_RUNS, BLOCK_K)
    program = tl.program_id(0)
    q_run = program % Q_RUNS
    k_tile = program // Q_RUNS % (K_RUNS * k_tiles)
    batch = program // Q_RUNS // (K_RUNS * k_tiles)
    row = load_row(rows_ptr, q_run * K_RUNS + k_tile // k_tiles)
    n0 = k_tile % k_tiles * BLOCK_K
    n1 = tl.minimum(n0 + BLOCK_K, row.k_len)
    tiles = tiles_in_band(n0, n1, -row.hi, -row.lo, row.q_len, BLOCK_Q)
    lowest, highest, count = tiles.last, tiles.first, 0
    for start in range(tiles.first, tiles.last, SCAN):
        tile = start + tl.arange(0, SCAN)
        inside = tile < tiles.last
        if intervals_ptr is not None:
            place = ((batch * Q_RUNS + q_run).to(tl.int64) * q_tiles + tile) * K_RUNS + k_tile // k_tiles
            some = lies_in(n0 // BLOCK_K, intervals_ptr + place * LIST, inside)
        else:
            bounds = bounds_ptr + ((batch * Q_RUNS + q_run).to(tl.int64) * q_tiles + tile) * 4
            begin = (tl.maximum(tl.load(bounds, mask=inside, other=0) - row.k_start, 0) + row.stride - 1) // row.stride
            end = (tl.maximum(tl.load(bounds + 1, mask=inside, other=0) - row.k_start, 0) + row.stride - 1) // row.stride
            some = inside & (begin // BLOCK_K <= n0 // BLOCK_K) & (n0 // BLOCK_K < tl.cdiv(tl.minimum(end, row.k_len), BLOCK_K))
        lowest = tl.minimum(lowest, tl.min(tl.where(some, tile, tiles.last), 0))
        highest = tl.maximum(highest, tl.max(tl.where(some, tile + 1, tiles.first), 0))
        count += tl.sum(some.to(tl.int32), 0)
    at = query_tiles_ptr + program.to(tl.int64) * 4
    tl.store(at, lowest)
    tl.store(at + 1, tl.maximum(highest, lowest))
    tl.store(at + 2, count)
    tl.store(at + 3, 0)


@triton.jit
def not_finite(
    x_BTGD, not_finite_ptr, T, G,
    D: tl.constexpr, STRIDE: tl.constexpr, COLUMN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store, for one key head and one span of tokens of k or v, 1 if an element is infinite or NaN, else 0."""
    spans = tl.cdiv(T, SPAN * SPANS) * SPANS
    program = tl.program_id(0)
    span = program % spans
    group = program // spans % G
    batch = (program // spans // G).to(tl.int64)
    token = span * SPAN + tl.arange(0, SPAN)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    at = ((batch * T + token) * G + group) * STRIDE + COLUMN + d
    x = tl.load(x_BTGD + at, mask=(token < T) & (d < D), other=0.0).to(tl.float32)
    flag = tl.max(tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 1), 0)
    tl.store(not_finite_ptr + program, flag)
