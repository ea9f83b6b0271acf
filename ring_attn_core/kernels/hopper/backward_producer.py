"""The producer of the Hopper backward: one warp that loads the keys, then the inputs of each query tile, in Gluon.

    k, v | q, lse2 of step 0 | dout, delta of step 0 | q, lse2 of step 1 | ...

TMA loads the tiles in the order of their use by the consumers, each as soon as its stage is free (barriers.py). The producer
stores lse2 and delta itself: they are not aligned to 16 bytes, so TMA cannot read them. It subtracts the ALiBi bias of queries
from lse2. With extents it also stores the visible keys of each query in a word, and the tile's first query.

Fully masked queries have an infinite lse2 and may hold NaN, and 0 times NaN is NaN. TMA signals a tile with such queries to an
mbarrier of the producer, which zeroes their rows before it signals the consumers.

Shapes     ``sources``: q_BSHD, dout_BSHE, k_BTGD, v_BTGE as ``Parts`` of TMA descriptors; lse2_BHS, delta_BHS f32;
           key_ranges int32 [B, k_runs, 2, S] (portable/extent_lists.py)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..portable.rows import Q_BASE, ROW_FIELDS, load_row
from ..portable.scores import LOG2E
from .backward_scheduler import visits, walk_of
from .barriers import DOUT_READ, Q_READ, acquire, sync_warp, write_number
from .parts import bring_parts, expect_parts
from .register_layouts import here, matrix, rows_by_lines

WHOLE = gl.constexpr(1 << 30)
"""Flag in the number of a tile's first query: each of its queries sees each key of the program, so no score needs a mask."""


class Sources(NamedTuple):
    """The TMA descriptors of the inputs, each a ``Parts``."""

    q: Any
    dout: Any
    k: Any
    v: Any


@gluon.jit
def producer(sources, args, shared, work, sizes: gl.constexpr):
    """Load k and v, then q, lse2, dout and delta of each step, in the order of their use."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    STAGES: gl.constexpr = sizes.STAGES
    OUT_STAGES: gl.constexpr = sizes.OUT_STAGES
    if work.steps > 0:
        token = work.k_run * work.k_slot + work.n0
        full = shared.keys_full.index(0)
        expect_parts(full, sizes.BLOCK_K, sizes.BLOCK_D + sizes.TAIL_D + sizes.BLOCK_E + sizes.TAIL_E)
        bring_parts(sources.k, work.batch, token, work.group, 0, full, shared.k, 0, sizes.TAIL_D)
        bring_parts(sources.v, work.batch, token, work.group, sizes.V_COLUMN, full, shared.v, 0, sizes.TAIL_E)
        step = 0
        cleaned = gl.to_tensor(0)
        for member in range(sizes.H // sizes.G):
            head = work.group * (sizes.H // sizes.G) + member
            for each in range(sizes.Q_RUNS):
                q_run = sizes.Q_RUNS - 1 - each
                first, last, gaps = walk_of(work, q_run)
                q_base = gl.load(args.rows + (q_run * sizes.K_RUNS + work.k_run) * ROW_FIELDS + Q_BASE)
                for t in range(last - first):
                    tile = last - 1 - t
                    if visits(args, work, sizes, q_run, tile, gaps):
                        i = tile * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [1], [0]))
                        token = q_base + tile * BLOCK_Q
                        sums = (work.batch * sizes.H + head).to(gl.int64) * args.S + q_base + i
                        inside = i < work.q_slot
                        if sizes.FULLY_MASKED:  # the tile may end with queries of the next run, and these may hold NaN
                            inside = i < args.S - q_base
                        lse2 = gl.load(args.lse2 + sums, mask=inside, other=0.0)
                        delta = gl.load(args.delta + sums, mask=inside, other=0.0)
                        if args.alibi_slopes is not None:
                            lse2 -= bias_of_queries(args, work, sizes, q_run, head, i)
                        if args.key_ranges is not None:
                            seen = seen_of_tile(args, work, sizes, q_base + i, i < work.q_slot)
                        stage = step % STAGES
                        if step >= STAGES:
                            acquire(Q_READ + stage, 2)
                        if args.key_ranges is not None:
                            shared.extents.index(stage).store(seen)
                        if args.query_tiles is not None:
                            first_query = tile * BLOCK_Q
                            if args.key_ranges is not None and args.key_extents is None:
                                all_seen = gl.min(seen, 0) == sizes.BLOCK_K << 8
                                first_query |= gl.where(all_seen, WHOLE, 0)
                            write_number(shared.first_query, stage, first_query)
                        shared.lse2.index(stage).store(lse2)
                        sync_warp()
                        at = [work.batch, token, head]
                        clean = True
                        if sizes.FULLY_MASKED:
                            clean = gl.max(lse2, 0) < float("inf")
                        q_full = shared.q_full.index(stage)
                        bring_queries(sources.q, at, q_full, shared.q, stage, clean, cleaned, stage, shared, sizes.TAIL_D)
                        of_lse2 = stage
                        stage = step % OUT_STAGES
                        if step >= OUT_STAGES:
                            acquire(DOUT_READ + stage, 2)
                        shared.delta.index(stage).store(delta)
                        sync_warp()
                        out_full = shared.dout_full.index(stage)
                        bring_queries(
                            sources.dout, at, out_full, shared.dout, stage, clean, cleaned + 1, of_lse2, shared, sizes.TAIL_E
                        )
                        if not clean:
                            cleaned += 2
                        step += 1
        for left in range(gl.maximum(step - STAGES, 0), step):  # no named barrier may stay partly arrived at
            acquire(Q_READ + left % STAGES, 2)
        for left in range(gl.maximum(step - OUT_STAGES, 0), step):
            acquire(DOUT_READ + left % OUT_STAGES, 2)


@gluon.jit
def bring_queries(source, at, full, tiles, stage, clean, cleaned, of_lse2, shared, TAIL: gl.constexpr):
    """Load a tile of q or dout by TMA. Unless ``clean``, zero the rows of fully masked queries, whose lse2 is infinite.

    ``cleaned``: number of tiles that this program has zeroed so far. ``of_lse2``: the stage of lse2.
    """
    ROWS: gl.constexpr = tiles.main.shape[2]
    WIDTH: gl.constexpr = tiles.main.shape[4] + TAIL
    if clean:
        expect_parts(full, ROWS, WIDTH)
        bring_parts(source, at[0], at[1], at[2], 0, full, tiles, stage, TAIL)
    else:
        own = shared.own_full.index(0)
        expect_parts(own, ROWS, WIDTH)
        bring_parts(source, at[0], at[1], at[2], 0, own, tiles, stage, TAIL)
        mbarrier.wait(own, cleaned & 1)
        zero_fully_masked(tiles.main, stage, shared.lse2.index(of_lse2))
        if TAIL > 0:
            zero_fully_masked(tiles.tail, stage, shared.lse2.index(of_lse2))
        fence_async_shared()
        sync_warp()
        mbarrier.arrive(full, count=1)


@gluon.jit
def zero_fully_masked(tiles, stage, lse2):
    """Zero the rows of a tile in shared memory whose lse2 is infinite, eight at a time to save registers."""
    ROWS: gl.constexpr = tiles.shape[2]
    COLUMNS: gl.constexpr = tiles.shape[4]
    LINES: gl.constexpr = rows_by_lines(64, 1)
    for row in gl.static_range(0, ROWS, 8):
        for each in gl.static_range(0, COLUMNS, 64):
            some = matrix(tiles.index(here(stage))).slice(row, 8).slice(each, 64, dim=1)
            seen = lse2.slice(row, 8).load(gl.SliceLayout(1, LINES)) < float("inf")
            some.store(gl.where(gl.expand_dims(seen, 1), some.load(LINES), 0.0))


@gluon.jit
def seen_of_tile(args, work, sizes: gl.constexpr, token, inside):
    """Return a word for each query: the first visible key of the tile (low 8 bits) and the number of visible keys (above)."""
    at = args.key_ranges + (work.batch * sizes.K_RUNS + work.k_run).to(gl.int64) * 2 * args.S + token
    begin = gl.load(at, mask=inside, other=0)
    end = gl.load(at + args.S, mask=inside, other=0)
    begin = gl.minimum(gl.maximum(begin - work.n0, 0), sizes.BLOCK_K)
    end = gl.minimum(gl.maximum(end - work.n0, 0), sizes.BLOCK_K)
    return begin | gl.maximum(end - begin, 0) << 8


@gluon.jit
def bias_of_queries(args, work, sizes: gl.constexpr, q_run, head, i):
    """Return the ALiBi bias between each query and the tile's first key, in base 2."""
    row = load_row(args.rows, q_run * sizes.K_RUNS + work.k_run)
    slope = gl.load(args.alibi_slopes + head).to(gl.float32) * LOG2E
    return slope * (row.k_start - row.q_start + row.stride * (work.n0 - i)).to(gl.float32)
