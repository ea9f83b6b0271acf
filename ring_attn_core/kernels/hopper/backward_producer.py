"""The warp of the Hopper backward that brings tiles: the keys, then of every tile of queries what the products need, in Gluon."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.rows import ROW_FIELDS, keys_seen, load_row
from ..portable.scores import LOG2E
from .backward_scheduler import BLOCK_K, visits, walk_of
from .barriers import acquire, everywhere, write_number
from .gluon import copy_tile


@gluon.jit
def producer(q_BSHD, dout_BSHE, k_BTGD, v_BTGE, given, shared, place, sizes: gl.constexpr):
    """k and v, then q and dout of every step with their sums, in the order of the consumers."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    STAGES: gl.constexpr = sizes.STAGES
    OUT_STAGES: gl.constexpr = sizes.OUT_STAGES
    if place.steps > 0:
        token = place.k_run * place.slot + place.n0
        full = shared.keys_full.index(0)
        mbarrier.expect(full, 4 * BLOCK_K * sizes.BLOCK_D)
        copy_tile(k_BTGD, [place.batch, token, place.group, 0], full, shared.k.index(0))
        copy_tile(v_BTGE, [place.batch, token, place.group, sizes.V_COLUMN], full, shared.v.index(0))
        step = 0
        for member in range(sizes.H // sizes.G):
            head = place.group * (sizes.H // sizes.G) + member
            for each in range(sizes.Q_RUNS):
                q_run = sizes.Q_RUNS - 1 - each
                first, last = walk_of(place, q_run)
                q_base = gl.load(given.rows + (q_run * sizes.K_RUNS + place.k_run) * ROW_FIELDS + 2)
                for t in range(last - first):
                    tile = last - 1 - t
                    if visits(given, place, sizes, q_run, tile):
                        i = tile * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [1], [0]))
                        at = [place.batch, q_base + tile * BLOCK_Q, head, 0]
                        sums = (place.batch * sizes.H + head).to(gl.int64) * given.S + q_base + i
                        lse2 = gl.load(given.lse2 + sums, mask=i < place.q_slot, other=0.0)
                        delta = gl.load(given.delta + sums, mask=i < place.q_slot, other=0.0)
                        if given.slopes is not None:
                            lse2 -= bias_of_queries(given, place, sizes, q_run, head, i)
                        if given.extents is not None:
                            seen = seen_of_tile(given, place, sizes, q_run, i)
                        stage = step % STAGES
                        if step >= STAGES:
                            acquire(stage, 2)
                        if given.extents is not None:
                            shared.seen.index(stage).store(seen)
                            write_number(shared.query, stage, tile * BLOCK_Q)
                        bring(lse2, shared.lse2, q_BSHD, at, shared.q, shared.q_full, stage, sizes)
                        stage = step % OUT_STAGES
                        if step >= OUT_STAGES:
                            acquire(STAGES + stage, 2)
                        bring(delta, shared.delta, dout_BSHE, at, shared.dout, shared.dout_full, stage, sizes)
                        step += 1
        for left in range(gl.maximum(step - STAGES, 0), step):  # no named barrier may stay half full
            acquire(left % STAGES, 2)
        for left in range(gl.maximum(step - OUT_STAGES, 0), step):
            acquire(STAGES + left % OUT_STAGES, 2)


@gluon.jit
def bring(x, sums, source, at, tiles, full, stage, sizes: gl.constexpr):
    """A tile of q or dout by TMA, and the sums of its queries by hand: TMA reads from multiples of 16 bytes only."""
    sums.index(stage).store(x)
    everywhere("bar.warp.sync 0xffffffff;")
    mbarrier.expect(full.index(stage), 2 * sizes.BLOCK_Q * sizes.BLOCK_D)
    copy_tile(source, at, full.index(stage), tiles.index(stage))


@gluon.jit
def seen_of_tile(given, place, sizes: gl.constexpr, q_run, i):
    """A word for each query: the first key of the tile that it sees, and from bit 8 on how many."""
    lo, hi, q_base, q_len, _, _, k_len, k_start, stride = load_row(given.rows, q_run * sizes.K_RUNS + place.k_run)
    begin, end = keys_seen(i, given.extents, place.batch, given.S, lo, hi, q_base, q_len, k_len, k_start, stride)
    begin = gl.minimum(gl.maximum(begin - place.n0, 0), BLOCK_K)
    end = gl.minimum(gl.maximum(end - place.n0, 0), BLOCK_K)
    return begin | gl.maximum(end - begin, 0) << 8


@gluon.jit
def bias_of_queries(given, place, sizes: gl.constexpr, q_run, head, i):
    """What ALiBi adds to the scores of queries with the tile's first key, in base 2."""
    _, _, _, _, q_start, _, _, k_start, stride = load_row(given.rows, q_run * sizes.K_RUNS + place.k_run)
    slope = gl.load(given.slopes + head).to(gl.float32) * LOG2E
    return slope * (k_start - q_start + stride * (place.n0 - i)).to(gl.float32)
