"""The scheduler of the Hopper backward, in Gluon: the query tiles that a program visits for its key tile.

    visited = query tiles that may see the key tile: by the band; with extents also by the query tile's bounds (backward_sums.py);
              with key extents also by the query tile's intervals of key tiles (extent_lists.py)

Each program walks a run of queries from the last tile to the first. So programs follow each other, and adder warps rarely wait.

Shapes     rows int32 [q_runs, k_runs, fields], bounds int32 [B, q tiles, 4] (portable/backward_sums.py), query_tiles int32
           [B, k tiles, q_runs, 4] and intervals (portable/extent_lists.py)
Units      local indices of a run, except bounds, which are token positions
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.extent_lists import HEADER, LIST
from ..portable.rows import Tiles, load_row, seen_from, tiles_in_band


class KeyWork(NamedTuple):
    """The key tile of a program, from local key ``n0`` on, and the query tiles that it visits. ``k_slot``, ``q_slot``: tokens of
    a run, padding included. For each query run and head the program visits ``visited`` of the tiles ``first .. last - 1``;
    ``steps``: the sum over runs and heads."""

    batch: Any
    group: Any
    k_run: Any
    k_tile: Any
    n0: Any
    k_slot: Any
    q_slot: Any
    steps: Any
    first: Any
    last: Any
    visited: Any


@gluon.jit
def query_tiles(rows_ptr, q_run, k_run, k_tile, sizes: gl.constexpr):
    """Return the query tiles of a run that meet the band of a key tile, as a ``Tiles`` of portable/rows.py."""
    row = load_row(rows_ptr, q_run * sizes.K_RUNS + k_run)
    n0 = k_tile * sizes.BLOCK_K
    tiles = tiles_in_band(n0, gl.minimum(n0 + sizes.BLOCK_K, row.k_len), -row.hi, -row.lo, row.q_len, sizes.BLOCK_Q)
    whole_last = gl.where(n0 + sizes.BLOCK_K > row.k_len, tiles.whole_first, tiles.whole_last)
    return Tiles(tiles.first, tiles.last, tiles.whole_first, whole_last)


@gluon.jit
def keys_of_program(together, args, sizes: gl.constexpr):
    """Return the key tile of this program; programs take tile 0 of ``together`` key heads, then tile 1 of each, and so on."""
    k_slot = args.T // sizes.K_RUNS
    tiles = gl.cdiv(k_slot, sizes.BLOCK_K)
    before = gl.program_id(0) // (together * sizes.K_RUNS * tiles) * together
    heads = gl.minimum(together, gl.num_programs(0) // (sizes.K_RUNS * tiles) - before)
    within = gl.program_id(0) - before * sizes.K_RUNS * tiles
    tile = within // heads
    head = before + within % heads
    n0 = tile % tiles * sizes.BLOCK_K
    q_slot = args.S // sizes.Q_RUNS
    return KeyWork(
        head // args.G, head % args.G, tile // tiles, tile % tiles, n0, k_slot, q_slot, 0, (0, 0), (0, 0), (0, 0)
    )  # fmt: skip


@gluon.jit
def survey(args, work, sizes: gl.constexpr):
    """Return ``work`` with its query tiles counted, by the band or from the array ``query_tiles`` (extent_lists.py)."""
    gl.static_assert(sizes.Q_RUNS <= 2)
    steps = 0
    firsts = (0, 0)
    lasts = (0, 0)
    counts = (0, 0)
    for q_run in gl.static_range(sizes.Q_RUNS):
        if args.query_tiles is None:
            tiles = query_tiles(args.rows, q_run, work.k_run, work.k_tile, sizes)
            first, last, count = tiles.first, tiles.last, tiles.last - tiles.first
        else:
            tile = (work.batch * sizes.K_RUNS + work.k_run) * gl.cdiv(work.k_slot, sizes.BLOCK_K) + work.k_tile
            at = args.query_tiles + (tile.to(gl.int64) * sizes.Q_RUNS + q_run) * 4
            first, last, count = gl.load(at), gl.load(at + 1), gl.load(at + 2)
        steps += count
        if q_run == 0:
            firsts = (first, first)
            lasts = (last, last)
            counts = (count, count)
        else:
            firsts = (firsts[0], first)
            lasts = (lasts[0], last)
            counts = (counts[0], count)
    steps = steps * (args.H // args.G)
    return KeyWork(
        work.batch, work.group, work.k_run, work.k_tile, work.n0, work.k_slot, work.q_slot, steps, firsts, lasts, counts
    )  # fmt: skip


@gluon.jit
def walk_of(work, q_run):
    """Return (first, end, gaps): the range of query tiles in a run, and whether the program skips some of these tiles."""
    first, last = gl.where(q_run == 0, work.first[0], work.first[1]), gl.where(q_run == 0, work.last[0], work.last[1])
    return first, last, last - first > gl.where(q_run == 0, work.visited[0], work.visited[1])


@gluon.jit
def visits(args, work, sizes: gl.constexpr, q_run, tile, gaps):
    """Return whether the program visits a query tile: with ``gaps`` only if the tile's extents meet the key tile."""
    if args.query_tiles is None:
        some = True
    else:
        some = tile >= -1
        if gaps:
            if args.intervals is None:
                first, last = keys_in_extents(args, work, sizes, q_run, work.k_run, tile)
                some = (first <= work.k_tile) & (work.k_tile < last)
            else:
                _, _, some = keys_in_intervals(args, work, sizes, q_run, work.k_run, tile)
    return some


@gluon.jit
def queries_of_keys(j, args, work, row):
    """Return first and end (exclusive) of the queries of a run that see each key ``j``, by the band and the key extent."""
    first, end = seen_from(j, args.key_extents, work.batch, args.T, row)
    return gl.maximum(first, j + row.lo), gl.minimum(end, j + row.hi + 1)


@gluon.jit
def keys_in_intervals(args, work, sizes: gl.constexpr, q_run, k_run, tile):
    """Return (key tiles of a run that a query tile may see, those before the program's key tile, whether that is one of them).
    ``tile`` may be -1, because ``adder`` of backward_dq.py asks one tile ahead; that result is not used."""
    tiles = gl.cdiv(work.q_slot, sizes.BLOCK_Q)
    tile = (work.batch * sizes.Q_RUNS + q_run).to(gl.int64) * tiles + gl.minimum(gl.maximum(tile, 0), tiles - 1)
    at = args.intervals + (tile * sizes.K_RUNS + k_run) * LIST
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    inside = lane < gl.load(at + 2)
    first = gl.load(at + HEADER + 2 * lane, mask=inside, other=0)
    end = gl.load(at + HEADER + 1 + 2 * lane, mask=inside, other=0)
    before = gl.sum(gl.maximum(gl.minimum(end, work.k_tile) - first, 0), 0)
    here = gl.max(((first <= work.k_tile) & (work.k_tile < end)).to(gl.int32), 0)
    return gl.load(at), before, here > 0


@gluon.jit
def keys_in_extents(args, work, sizes: gl.constexpr, q_run, k_run, tile):
    """Return first and end (exclusive) of the key tiles of a run that a query tile may see by its extents."""
    row = load_row(args.rows, q_run * sizes.K_RUNS + k_run)
    tiles = gl.cdiv(work.q_slot, sizes.BLOCK_Q)
    at = args.bounds + ((work.batch * sizes.Q_RUNS + q_run).to(gl.int64) * tiles + gl.minimum(gl.maximum(tile, 0), tiles - 1)) * 4
    begin = (gl.maximum(gl.load(at) - row.k_start, 0) + row.stride - 1) // row.stride
    end = gl.minimum((gl.maximum(gl.load(at + 1) - row.k_start, 0) + row.stride - 1) // row.stride, row.k_len)
    return begin // sizes.BLOCK_K, (end + sizes.BLOCK_K - 1) // sizes.BLOCK_K
