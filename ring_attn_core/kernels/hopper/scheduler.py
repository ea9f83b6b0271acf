"""The scheduler of ``forward`` and ``hopper_wide_dq``, in Gluon: a program's query tiles, and the order of their key tiles.

    ticket -> query tile          ``together`` heads at a time, and of these heads the query tiles with the most key tiles first
    walk of a run of keys         first the tiles that need a mask, then the others (``tile_at``, ``next_place``)

A run is a part of a shard with evenly spaced token positions (runs.py). The producer takes tickets and announces each query tile
in shared memory; the consumers read the announcement.

Shapes     rows int32 [q_runs, k_runs, fields], extents int32 [B, S, 2], alibi_slopes f32 [H]
Units      queries, keys and tiles: indices within a run ("local"). Tokens: indices within a shard. Extents: token positions
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.extent_lists import HEADER, LIST
from ..portable.rows import (
    Tiles,
    count_partly_seen,
    keys_between,
    keys_seen,
    load_row,
    partly_seen,
    tiles_in_band,
)
from ..portable.scores import LOG2E
from .barriers import read_number, sync_warp, write_number


class QueryWork(NamedTuple):
    """A query tile of one batch row and head, from local query ``m0`` of run ``q_run`` on. ``tiles``: its key tiles, -1 after the
    last query tile. ``first_run``, ``first_token``: of the first key tile."""

    batch: Any
    head: Any
    q_run: Any
    m0: Any
    tiles: Any
    first_run: Any
    first_token: Any


NUMBERS = gl.constexpr(8)
"""Number of int32 in shared memory for the fields of a ``QueryWork``, padded to a power of two."""


class RunOfKeys(NamedTuple):
    """A run of keys, with the bounds ``begin``, ``end`` of the keys that each query of a warpgroup sees by band and extent.
    ``pair``: index of the ``runs.Row``. ``tiles``: the ``rows.Tiles`` to visit. ``slope``: ALiBi slope of the head, in base 2."""

    pair: Any
    begin: Any
    end: Any
    tiles: Any
    q_start: Any
    k_start: Any
    stride: Any
    slope: Any


@gluon.jit
def extents_of_group(args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Load the extents (first, end) of a warpgroup's 64 queries, (0, 0) beyond the run; the caller is a partition of one warp."""
    row = load_row(args.rows, work.q_run * sizes.K_RUNS)
    i = work.m0 + 64 * GROUP + gl.arange(0, 64, gl.BlockedLayout([2], [32], [1], [0]))
    at = args.extents + (work.batch.to(gl.int64) * args.S + row.q_base + i) * 2
    return gl.load(at, mask=i < row.q_len, other=0), gl.load(at + 1, mask=i < row.q_len, other=0)


@gluon.jit
def visible(column, begin, end):
    """Return the mask ``begin <= column < end``, bool [queries, keys]; with two comparisons the loop would spill."""
    width = gl.expand_dims(gl.maximum(end - begin, 0).to(gl.uint32), 1)
    return (gl.expand_dims(column, 0) - gl.expand_dims(begin, 1)).to(gl.uint32) < width


@gluon.jit
def visible_by_key(columns, i, n0, run, args, work):
    """Return a mask, bool [queries, keys]: True if the position of the query lies in the extent of the key."""
    row = load_row(args.rows, run.pair)
    inside = n0 + columns < row.k_len
    at = args.key_extents + (work.batch.to(gl.int64) * args.T + row.k_base + n0 + columns) * 2
    first, end = gl.load(at, mask=inside, other=0), gl.load(at + 1, mask=inside, other=0)
    width = gl.expand_dims(gl.maximum(end - first, 0).to(gl.uint32), 0)
    position = row.q_start + row.stride * i
    return (gl.expand_dims(position, 1) - gl.expand_dims(first, 0)).to(gl.uint32) < width


@gluon.jit
def key_tiles(args, batch, pair, m0, sizes: gl.constexpr):
    """Return the key tiles of a run that a query tile visits. With key extents, tile t means the t-th tile in the list of
    intervals, where tiles that need a mask come first."""
    if args.intervals is not None:
        at = list_of(args, batch, pair, m0, sizes)
        count, masked = gl.load(at), gl.load(at + 1)
        tiles = Tiles(0, count, masked, count)
    elif args.key_tiles is None:
        row = load_row(args.rows, pair)
        m1 = gl.minimum(m0 + sizes.BLOCK_Q, row.q_len)
        tiles = tiles_in_band(m0, m1, row.lo, row.hi, row.k_len, sizes.BLOCK_K)
    else:
        at = args.key_tiles + query_tile(args, batch, pair, m0, sizes) * 4
        tiles = Tiles(gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3))
    return tiles


@gluon.jit
def query_tile(args, batch, pair, m0, sizes: gl.constexpr):
    """Return the int64 index of (query tile at ``m0``, key run) in ``args.key_tiles`` and ``args.intervals``."""
    tiles_of_run = gl.cdiv(args.S // sizes.Q_RUNS, sizes.BLOCK_Q)
    tile = (batch * sizes.Q_RUNS + pair // sizes.K_RUNS) * tiles_of_run + m0 // sizes.BLOCK_Q
    return tile.to(gl.int64) * sizes.K_RUNS + pair % sizes.K_RUNS


@gluon.jit
def list_of(args, batch, pair, m0, sizes: gl.constexpr):
    """Return the pointer to the list in ``args.intervals`` of the key tiles that a query tile visits in a run of keys."""
    return args.intervals + query_tile(args, batch, pair, m0, sizes) * LIST


@gluon.jit
def work_of(ticket, args, sizes: gl.constexpr):
    """Return the query tile of a ticket. Tickets take the costliest tile of each of ``args.together`` heads, then the next of
    each, so that all programs end at nearly the same time. Without extents this is the order from last to first, as under a
    causal mask."""
    tiles_of_run = gl.cdiv(args.S // sizes.Q_RUNS, sizes.BLOCK_Q)
    tiles = sizes.Q_RUNS * tiles_of_run
    before = ticket // (args.together * tiles) * args.together
    heads = gl.maximum(gl.minimum(args.together, args.total // tiles - before), 1)  # the minimum is 0 after the last tile
    within = ticket - before * tiles
    head = before + within % heads
    batch = head // args.H
    tile = tiles - 1 - within // heads
    if args.tile_order is not None:
        tile = gl.load(args.tile_order + batch * tiles + within // heads, mask=ticket < args.total, other=0)
    q_run = tile // tiles_of_run
    m0 = tile % tiles_of_run * sizes.BLOCK_Q
    count = -1
    first_run = 0
    first_token = 0
    if ticket < args.total:
        count, first_run, first_token = survey(args, batch, q_run, m0, sizes)
    return QueryWork(batch, head % args.H, q_run, m0, count, first_run, first_token)


@gluon.jit
def announce(work, shared):
    """Write the next query tile to shared memory and signal the consumers, which have already read the previous one."""
    for field in gl.static_range(7):
        write_number(shared.work, field, work[field])
    sync_warp()
    mbarrier.arrive(shared.work_full.index(0), count=1)


@gluon.jit
def await_tile(taken, shared):
    """Wait for the next announced query tile, and return it; the caller must release the barrier WORK_READ."""
    mbarrier.wait(shared.work_full.index(0), taken & 1)
    return QueryWork(
        read_number(shared.work, 0), read_number(shared.work, 1), read_number(shared.work, 2), read_number(shared.work, 3),
        read_number(shared.work, 4), read_number(shared.work, 5), read_number(shared.work, 6),
    )  # fmt: skip


@gluon.jit
def survey(args, batch, q_run, m0, sizes: gl.constexpr):
    """Return (number of key tiles of a query tile, first run that has a key tile, token at which the first key tile begins)."""
    count = 0
    first_run = 0
    first_token = 0
    for run in range(sizes.K_RUNS):
        pair = q_run * sizes.K_RUNS + run
        tiles = key_tiles(args, batch, pair, m0, sizes)
        token = load_row(args.rows, pair).k_base
        first = tile_at(0, tiles)
        if args.intervals is not None:
            first = gl.load(list_of(args, batch, pair, m0, sizes) + HEADER + 1) - 1
        token += first * sizes.BLOCK_K
        first_run = gl.where(count == 0, run, first_run)
        first_token = gl.where(count == 0, token, first_token)
        count += tiles.last - tiles.first
    return count, first_run, first_token


@gluon.jit
def tile_at(t, tiles):
    """Return the t-th tile in the walk of a run: first those that need a mask, then the others from the last to the first."""
    masked = count_partly_seen(tiles)
    return gl.where(t < masked, partly_seen(t, tiles), tiles.whole_last - 1 - (t - masked))


class Place(NamedTuple):
    """The place in a walk over a run's key tiles: ``tile``, tiles ``left`` in its interval, pointer to the next ``interval``."""

    tile: Any
    left: Any
    interval: Any


@gluon.jit
def start_of(args, batch, pair, m0, sizes: gl.constexpr):
    """Return the ``Place`` before the first key tile of a run, from which ``next_place`` goes on."""
    if args.intervals is None:
        place = Place(0, 0, 0)
    else:
        place = Place(0, 0, list_of(args, batch, pair, m0, sizes) + HEADER)
    return place


@gluon.jit
def next_place(place, t, tiles, args):
    """Return the ``Place`` of the t-th key tile, after ``place``; an interval is walked from its last tile to its first."""
    if args.intervals is None:
        place = Place(tile_at(t, tiles), 0, 0)
    else:
        tile, left, interval = place
        if left == 0:
            tile = gl.load(interval + 1)
            left = tile - gl.load(interval)
            interval += 2
        place = Place(tile - 1, left - 1, interval)
    return place


@gluon.jit
def run_of(args, shared, loads, work, sizes: gl.constexpr, number, i, GROUP: gl.constexpr):
    """Return run ``number`` of keys for the queries ``i`` of a warpgroup. If shared memory has room, the producer stores their
    extents there with q. ``loads``: query tiles whose q was loaded before."""
    pair = work.q_run * sizes.K_RUNS + number
    row = load_row(args.rows, pair)
    tiles = key_tiles(args, work.batch, pair, work.m0, sizes)
    slope = 0.0
    if args.alibi_slopes is not None:
        slope = gl.load(args.alibi_slopes + work.head).to(gl.float32) * LOG2E
    if shared.extents is None:
        begin, end = keys_seen(i, args.extents, work.batch, args.S, row)
    else:
        mbarrier.wait(shared.q_full.index(GROUP), loads & 1)
        first = shared.extents.index(2 * GROUP).load(i.type.layout)
        last = shared.extents.index(2 * GROUP + 1).load(i.type.layout)
        begin, end = keys_between(i, first, last, row)
    return RunOfKeys(pair, begin, end, tiles, row.q_start, row.k_start, row.stride, slope)
