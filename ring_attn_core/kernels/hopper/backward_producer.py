"""The producer of the Hopper backward: one warp that loads the keys, then the inputs of each query tile, in Gluon.

    k, v | q, lse2 of step 0 | dout, delta of step 0 | q, lse2 of step 1 | ...

TMA loads the tiles in the order of their use by the consumers, each as soon as its stage is free (barriers.py). The producer
stores lse2 and delta itself: they are not aligned to 16 bytes, so TMA cannot read them. It subtracts the ALiBi bias of queries
from lse2. With extents it also stores a word per query, the keys of the tile that it sees, and the tile's first query.

Shapes     ``sources``: q_BSHD, dout_BSHE, k_BTGD, v_BTGE as ``Parts`` of TMA descriptors; lse2_BHS, delta_BHS f32
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.rows import Q_BASE, ROW_FIELDS, keys_seen, load_row
from ..portable.scores import LOG2E
from .backward_scheduler import visits, walk_of
from .barriers import DOUT_READ, Q_READ, acquire, sync_warp, write_number
from .parts import bring_parts, expect_parts


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
                        lse2 = gl.load(args.lse2 + sums, mask=i < work.q_slot, other=0.0)
                        delta = gl.load(args.delta + sums, mask=i < work.q_slot, other=0.0)
                        if args.alibi_slopes is not None:
                            lse2 -= bias_of_queries(args, work, sizes, q_run, head, i)
                        if args.extents is not None:
                            seen = seen_of_tile(args, work, sizes, q_run, i)
                        stage = step % STAGES
                        if step >= STAGES:
                            acquire(Q_READ + stage, 2)
                        if args.extents is not None:
                            shared.extents.index(stage).store(seen)
                        if args.query_tiles is not None:
                            write_number(shared.first_query, stage, tile * BLOCK_Q)
                        shared.lse2.index(stage).store(lse2)
                        sync_warp()
                        full = shared.q_full.index(stage)
                        expect_parts(full, BLOCK_Q, sizes.BLOCK_D + sizes.TAIL_D)
                        bring_parts(sources.q, work.batch, token, head, 0, full, shared.q, stage, sizes.TAIL_D)
                        stage = step % OUT_STAGES
                        if step >= OUT_STAGES:
                            acquire(DOUT_READ + stage, 2)
                        shared.delta.index(stage).store(delta)
                        sync_warp()
                        full = shared.dout_full.index(stage)
                        expect_parts(full, BLOCK_Q, sizes.BLOCK_E + sizes.TAIL_E)
                        bring_parts(sources.dout, work.batch, token, head, 0, full, shared.dout, stage, sizes.TAIL_E)
                        step += 1
        for left in range(gl.maximum(step - STAGES, 0), step):  # no named barrier may stay partly arrived at
            acquire(Q_READ + left % STAGES, 2)
        for left in range(gl.maximum(step - OUT_STAGES, 0), step):
            acquire(DOUT_READ + left % OUT_STAGES, 2)


@gluon.jit
def seen_of_tile(args, work, sizes: gl.constexpr, q_run, i):
    """Return a word for each query: the first key of the tile that it sees, and from bit 8 on their number."""
    row = load_row(args.rows, q_run * sizes.K_RUNS + work.k_run)
    begin, end = keys_seen(i, args.extents, work.batch, args.S, row)
    begin = gl.minimum(gl.maximum(begin - work.n0, 0), sizes.BLOCK_K)
    end = gl.minimum(gl.maximum(end - work.n0, 0), sizes.BLOCK_K)
    return begin | gl.maximum(end - begin, 0) << 8


@gluon.jit
def bias_of_queries(args, work, sizes: gl.constexpr, q_run, head, i):
    """Return the ALiBi bias of queries and the tile's first key, in base 2."""
    row = load_row(args.rows, q_run * sizes.K_RUNS + work.k_run)
    slope = gl.load(args.alibi_slopes + head).to(gl.float32) * LOG2E
    return slope * (row.k_start - row.q_start + row.stride * (work.n0 - i)).to(gl.float32)
