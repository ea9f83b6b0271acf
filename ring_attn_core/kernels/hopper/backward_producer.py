"""The producer of the Hopper backward: one warp that loads the keys, then the inputs of each query tile, in Gluon.

    k, v | q, lse2 of step 0 | dout, delta of step 0 | q, lse2 of step 1 | ...

TMA loads the tiles in the order of their use by the consumers, each as soon as its stage is free (barriers.py). The ALiBi bias of
the queries is subtracted from lse2. With extents the producer also stores a word per query, the keys of the tile that it sees,
and the index of the tile's first query.

Shapes     q_BSHD, dout_BSHE, k_BTGD, v_BTGE as TMA descriptors, lse2_BHS, delta_BHS f32
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.rows import Q_BASE, ROW_FIELDS, keys_seen, load_row
from ..portable.scores import LOG2E
from .backward_scheduler import BLOCK_K, visits, walk_of
from .barriers import DOUT_READ, Q_READ, acquire, sync_warp, write_number
from .gluon import copy_tile


@gluon.jit
def producer(q_BSHD, dout_BSHE, k_BTGD, v_BTGE, args, shared, work, sizes: gl.constexpr):
    """Load k and v, then q, lse2, dout and delta of each step, in the order of their use."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    STAGES: gl.constexpr = sizes.STAGES
    OUT_STAGES: gl.constexpr = sizes.OUT_STAGES
    if work.steps > 0:
        token = work.k_run * work.k_slot + work.n0
        full = shared.keys_full.index(0)
        mbarrier.expect(full, 4 * BLOCK_K * sizes.BLOCK_D)
        copy_tile(k_BTGD, [work.batch, token, work.group, 0], full, shared.k.index(0))
        copy_tile(v_BTGE, [work.batch, token, work.group, sizes.V_COLUMN], full, shared.v.index(0))
        step = 0
        for member in range(sizes.H // sizes.G):
            head = work.group * (sizes.H // sizes.G) + member
            for each in range(sizes.Q_RUNS):
                q_run = sizes.Q_RUNS - 1 - each
                first, last = walk_of(work, q_run)
                q_base = gl.load(args.rows + (q_run * sizes.K_RUNS + work.k_run) * ROW_FIELDS + Q_BASE)
                for t in range(last - first):
                    tile = last - 1 - t
                    if visits(args, work, sizes, q_run, tile):
                        i = tile * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [1], [0]))
                        at = [work.batch, q_base + tile * BLOCK_Q, head, 0]
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
                            write_number(shared.first_query, stage, tile * BLOCK_Q)
                        bring(lse2, shared.lse2, q_BSHD, at, shared.q, shared.q_full, stage, sizes)
                        stage = step % OUT_STAGES
                        if step >= OUT_STAGES:
                            acquire(DOUT_READ + stage, 2)
                        bring(delta, shared.delta, dout_BSHE, at, shared.dout, shared.dout_full, stage, sizes)
                        step += 1
        for left in range(gl.maximum(step - STAGES, 0), step):  # no named barrier may stay partly arrived at
            acquire(Q_READ + left % STAGES, 2)
        for left in range(gl.maximum(step - OUT_STAGES, 0), step):
            acquire(DOUT_READ + left % OUT_STAGES, 2)


@gluon.jit
def bring(x, sums, source, at, tiles, full, stage, sizes: gl.constexpr):
    """Load a tile of q or dout by TMA, and store its lse2 or delta, which TMA cannot read: it needs 16-byte alignment."""
    sums.index(stage).store(x)
    sync_warp()
    mbarrier.expect(full.index(stage), 2 * sizes.BLOCK_Q * sizes.BLOCK_D)
    copy_tile(source, at, full.index(stage), tiles.index(stage))


@gluon.jit
def seen_of_tile(args, work, sizes: gl.constexpr, q_run, i):
    """Return a word for each query: the first key of the tile that it sees, and from bit 8 on their number."""
    row = load_row(args.rows, q_run * sizes.K_RUNS + work.k_run)
    begin, end = keys_seen(i, args.extents, work.batch, args.S, row)
    begin = gl.minimum(gl.maximum(begin - work.n0, 0), BLOCK_K)
    end = gl.minimum(gl.maximum(end - work.n0, 0), BLOCK_K)
    return begin | gl.maximum(end - begin, 0) << 8


@gluon.jit
def bias_of_queries(args, work, sizes: gl.constexpr, q_run, head, i):
    """Return the ALiBi bias of queries and the tile's first key, in base 2."""
    row = load_row(args.rows, q_run * sizes.K_RUNS + work.k_run)
    slope = gl.load(args.alibi_slopes + head).to(gl.float32) * LOG2E
    return slope * (row.k_start - row.q_start + row.stride * (work.n0 - i)).to(gl.float32)
