"""Which tiles of queries a program of the backward visits."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.rows import load_row, tiles_in_band

SCAN = gl.constexpr(128)
BLOCK_K = gl.constexpr(128)


class Place(NamedTuple):
    """A program's tile of keys, from ``n0`` on of a run of ``slot``; ``k_tile`` is its number in that run.

    ``steps``: tiles of queries that it visits, of all heads; ``visited`` of each run, from the ``first`` to the ``last`` of it
    (see walk_of).
    """

    batch: Any
    group: Any
    k_run: Any
    k_tile: Any
    n0: Any
    slot: Any
    q_slot: Any
    steps: Any
    first: Any
    last: Any
    visited: Any


@gluon.jit
def query_tiles(rows_ptr, q_run, k_run, k_tile, sizes: gl.constexpr):
    """Tiles of a run of queries that see a tile of keys, and those that see it whole: first, last, whole_first, whole_last."""
    lo, hi, _, q_len, _, _, k_len, _, _ = load_row(rows_ptr, q_run * sizes.K_RUNS + k_run)
    n0 = k_tile * BLOCK_K
    first, last, whole_first, whole_last = tiles_in_band(n0, gl.minimum(n0 + BLOCK_K, k_len), -hi, -lo, q_len, sizes.BLOCK_Q)
    return first, last, whole_first, gl.where(n0 + BLOCK_K > k_len, whole_first, whole_last)


@gluon.jit
def survey(given, place, sizes: gl.constexpr):
    """The place with the tiles of queries that it visits: of a run those between ``first`` and ``last`` that ``visits`` names."""
    gl.static_assert(sizes.Q_RUNS <= 2)
    steps = 0
    firsts = (0, 0)
    lasts = (0, 0)
    counts = (0, 0)
    for q_run in gl.static_range(sizes.Q_RUNS):
        first, last, _, _ = query_tiles(given.rows, q_run, place.k_run, place.k_tile, sizes)
        if given.extents is None:
            count = last - first
        else:
            count = 0
            lowest = last
            highest = first
            for at in range(first, last, SCAN):
                tile = at + gl.arange(0, SCAN, gl.BlockedLayout([SCAN // 32], [32], [gl.num_warps()], [0]))
                some = (tile < last) & visits(given, place, sizes, q_run, tile)
                lowest = gl.minimum(lowest, gl.min(gl.where(some, tile, last), 0))
                highest = gl.maximum(highest, gl.max(gl.where(some, tile + 1, first), 0))
                count += gl.sum(some.to(gl.int32), 0)
            first = lowest
            last = gl.maximum(highest, lowest)
        steps += count
        if q_run == 0:
            firsts = (first, first)
            lasts = (last, last)
            counts = (count, count)
        else:
            firsts = (firsts[0], first)
            lasts = (lasts[0], last)
            counts = (counts[0], count)
    steps = steps * (sizes.H // sizes.G)
    return Place(
        place.batch, place.group, place.k_run, place.k_tile, place.n0, place.slot, place.q_slot, steps, firsts, lasts, counts
    )  # fmt: skip


@gluon.jit
def walk_of(place, q_run):
    """The first and the last tile of a run of queries that a tile of keys visits, and what is between them."""
    return gl.where(q_run == 0, place.first[0], place.first[1]), gl.where(q_run == 0, place.last[0], place.last[1])


@gluon.jit
def visits(given, place, sizes: gl.constexpr, q_run, tile):
    """Whether some query of a tile may see this tile of keys by its extent."""
    if given.extents is None:
        some = True
    else:
        first, last = keys_in_extents(given, place, sizes, q_run, place.k_run, tile)
        some = (first <= place.k_tile) & (place.k_tile < last)
    return some


@gluon.jit
def keys_in_extents(given, place, sizes: gl.constexpr, q_run, k_run, tile):
    """Tiles of a run of keys that some query of a tile of queries may see by its extent: first, last.

    ``adder`` asks for one tile ahead, so ``tile`` may be -1; what it says of that one is not used.
    """
    _, _, _, _, _, _, k_len, k_start, stride = load_row(given.rows, q_run * sizes.K_RUNS + k_run)
    tiles = gl.cdiv(place.q_slot, sizes.BLOCK_Q)
    at = (
        given.bounds
        + ((place.batch * sizes.Q_RUNS + q_run).to(gl.int64) * tiles + gl.minimum(gl.maximum(tile, 0), tiles - 1)) * 4
    )
    begin = (gl.maximum(gl.load(at) - k_start, 0) + stride - 1) // stride
    end = gl.minimum((gl.maximum(gl.load(at + 1) - k_start, 0) + stride - 1) // stride, k_len)
    return begin // BLOCK_K, (end + BLOCK_K - 1) // BLOCK_K
