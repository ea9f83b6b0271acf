"""Which queries a program of a Hopper kernel has, and which tiles of keys it walks in which order, in Gluon."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# (it takes what is known when a kernel is compiled for the class constexpr, and jitted functions for plain ones)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.rows import keys_seen, load_row, partly_seen, tiles_in_band, tiles_in_extents
from ..portable.scores import LOG2E
from .barriers import everywhere, read_number, write_number


class Place(NamedTuple):
    """A tile of queries, from ``m0`` on of a run: how many tiles of keys it walks (-1: there is no such tile of queries), from
    which run on, and which token comes first."""

    batch: Any
    head: Any
    q_run: Any
    m0: Any
    tiles: Any
    first_run: Any
    first_token: Any


FIELDS = gl.constexpr(8)
"""Numbers of a Place in shared memory, and some room."""


class Run(NamedTuple):
    """A run of keys: the interval of it that each query of a warpgroup sees, its tiles, and fields of its ``runs.Row``.

    ``slope``: ALiBi's, in base 2.
    """

    pair: Any
    begin: Any
    end: Any
    first: Any
    last: Any
    whole_first: Any
    whole_last: Any
    q_start: Any
    k_start: Any
    stride: Any
    slope: Any


@gluon.jit
def visible(column, begin, end):
    """bool [queries, keys]: begin <= column < end, in one comparison; two take a register a key, and the loop spills."""
    width = gl.expand_dims(gl.maximum(end - begin, 0).to(gl.uint32), 1)
    return (gl.expand_dims(column, 0) - gl.expand_dims(begin, 1)).to(gl.uint32) < width


@gluon.jit
def key_tiles(rows_ptr, extents_ptr, batch, S, pair, m0, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """Tiles of a run of keys that a tile of queries visits, and those it sees whole: first, last, whole_first, whole_last."""
    lo, hi, q_base, q_len, q_start, k_base, k_len, k_start, stride = load_row(rows_ptr, pair)
    m1 = gl.minimum(m0 + BLOCK_Q, q_len)
    first, last, whole_first, whole_last = tiles_in_band(m0, m1, lo, hi, k_len, BLOCK_K)
    if extents_ptr is not None:
        # Every warp holds all queries: no reduction passes through shared memory.
        i = m0 + gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [gl.num_warps()], [0]))
        begin, end = keys_seen(i, extents_ptr, batch, S, lo, hi, q_base, q_len, k_len, k_start, stride)
        first, last, whole_first, whole_last = tiles_in_extents(
            first, last, whole_first, whole_last, begin, end, i < q_len, BLOCK_K
        )
    return first, last, whole_first, whole_last


@gluon.jit
def place_of(ticket, given, sizes: gl.constexpr):
    """The tile of queries with a number: ``together`` heads at a time, of which the heaviest tiles come first."""
    tiles_of_run = gl.cdiv(given.S // sizes.Q_RUNS, sizes.BLOCK_Q)
    tiles = sizes.Q_RUNS * tiles_of_run
    before = ticket // (given.together * tiles) * given.together
    heads = gl.maximum(gl.minimum(given.together, given.total // tiles - before), 1)  # 0 behind the last tile
    place_in_heads = ticket - before * tiles
    tile = tiles - 1 - place_in_heads // heads
    head = before + place_in_heads % heads
    batch = head // sizes.H
    q_run = tile // tiles_of_run
    m0 = tile % tiles_of_run * sizes.BLOCK_Q
    count = -1
    first_run = 0
    first_token = 0
    if ticket < given.total:
        count, first_run, first_token = survey(
            given.rows, given.extents, batch, given.S, q_run, m0, sizes.K_RUNS, sizes.BLOCK_Q, sizes.BLOCK_K
        )
    return Place(batch, head % sizes.H, q_run, m0, count, first_run, first_token)


@gluon.jit
def tell(place, shared):
    """The producer's word to the consumers; they have read the one before."""
    for field in gl.static_range(7):
        write_number(shared.place, field, place[field])
    everywhere("bar.warp.sync 0xffffffff;")
    mbarrier.arrive(shared.place_full.index(0), count=1)


@gluon.jit
def told(taken, shared):
    """The tile of queries that the producer takes after ``taken`` others; to be released as PLACE_READ."""
    mbarrier.wait(shared.place_full.index(0), taken & 1)
    return Place(
        read_number(shared.place, 0), read_number(shared.place, 1), read_number(shared.place, 2), read_number(shared.place, 3),
        read_number(shared.place, 4), read_number(shared.place, 5), read_number(shared.place, 6),
    )  # fmt: skip


@gluon.jit
def survey(rows_ptr, extents_ptr, batch, S, q_run, m0, K_RUNS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """How many tiles all runs of keys hold for a tile of queries, the first run that holds any, and its first tile's token."""
    tiles = 0
    first_run = 0
    first_token = 0
    for run in range(K_RUNS):
        pair = q_run * K_RUNS + run
        first, last, whole_first, whole_last = key_tiles(rows_ptr, extents_ptr, batch, S, pair, m0, BLOCK_Q, BLOCK_K)
        _, _, _, _, _, k_base, _, _, _ = load_row(rows_ptr, pair)
        token = k_base + tile_at(0, first, last, whole_first, whole_last) * BLOCK_K
        first_run = gl.where(tiles == 0, run, first_run)
        first_token = gl.where(tiles == 0, token, first_token)
        tiles += last - first
    return tiles, first_run, first_token


@gluon.jit
def tile_at(t, first, last, whole_first, whole_last):
    """The t-th tile of a run in the order of the walk: those that need a mask, then the whole ones, the last one first."""
    masked = last - first - (whole_last - whole_first)
    return gl.where(t < masked, partly_seen(t, first, whole_first, whole_last), whole_last - 1 - (t - masked))


@gluon.jit
def run_of(given, place, sizes: gl.constexpr, number, i):
    """The number-th run of keys, as the queries ``i`` see it."""
    pair = place.q_run * sizes.K_RUNS + number
    lo, hi, q_base, q_len, q_start, k_base, k_len, k_start, stride = load_row(given.rows, pair)
    begin, end = keys_seen(i, given.extents, place.batch, given.S, lo, hi, q_base, q_len, k_len, k_start, stride)
    first, last, whole_first, whole_last = key_tiles(
        given.rows, given.extents, place.batch, given.S, pair, place.m0, sizes.BLOCK_Q, sizes.BLOCK_K
    )
    slope = 0.0
    if given.slopes is not None:
        slope = gl.load(given.slopes + place.head).to(gl.float32) * LOG2E
    return Run(pair, begin, end, first, last, whole_first, whole_last, q_start, k_start, stride, slope)
