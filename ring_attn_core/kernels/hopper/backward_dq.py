"""The gradient of the queries in the Hopper backward: summed by TMA in a fixed order, and rounded at the end.

    sums[q tile] += ds k of a key tile          in the order of the key tiles, so that two runs give the same bits
    dq = scale * sums                           ``hopper_dq``, once per ring

Shapes     sums_RX f32 [rows, 256] -> dq_BSHD. Each query tile has SUM_ROWS rows of sums, in the order of the accumulators'
           registers (``hand_over``). After the sums of all tiles, sums_RX holds one counter for each query tile, its turn: the
           number of key tiles that have added to its sums in this launch. The counters are ``TURN_SPACING`` words apart
Program    ``adder`` is a warp of the backward, and its steps are the query tiles that the program visits; ``hopper_dq`` runs one
           program for each (q tile, head, batch row)
Precision  f32; dq is rounded once to the input dtype
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.rows import load_row
from . import launches
from .backward_scheduler import keys_in_extents, keys_in_intervals, visits, walk_of
from .barriers import DQ_FREE, DQ_FULL, arrive, every_lane, sync, with_one_warp
from .gluon import add_tile, constexpr_function

SUM_ROWS = gl.constexpr(launches.SUM_ROWS)
SUM_COLUMNS = gl.constexpr(launches.SUM_COLUMNS)
SUMS = gl.constexpr(launches.SUM_ROWS * launches.SUM_COLUMNS)
TURN_SPACING = gl.constexpr(launches.TURN_SPACING)


@gluon.jit
def adder(dq_in_RX, args, shared, work, sizes: gl.constexpr):
    """Add the dq of each step to the sums of its query tile by TMA, as soon as all earlier key tiles have added theirs."""
    tiles = gl.cdiv(work.q_slot, sizes.BLOCK_Q)
    batch_rows = gl.num_programs(0) // (gl.cdiv(work.k_slot, sizes.BLOCK_K) * sizes.K_RUNS * args.G)
    words = args.sums + (batch_rows * args.H * sizes.Q_RUNS * tiles).to(gl.int64) * SUMS
    step = 0
    for member in range(args.H // args.G):
        head = work.group * (args.H // args.G) + member
        for each in range(sizes.Q_RUNS):
            q_run = sizes.Q_RUNS - 1 - each
            first, last, gaps = walk_of(work, q_run)
            at = ((work.batch * args.H + head) * sizes.Q_RUNS + q_run) * tiles
            turn, turns = turn_of(args, work, sizes, q_run, last - 1)
            here = visits(args, work, sizes, q_run, last - 1, gaps)
            for t in range(last - first):
                tile = last - 1 - t
                visited = here
                word = words + (at + tile) * TURN_SPACING
                by = gl.where(turn == turns - 1, -turn, 1)
                if visited:
                    wait_for_turn(word, turn)
                    sync(DQ_FULL, with_one_warp(2), 1)
                    add_tile(dq_in_RX, [(at + tile) * SUM_ROWS, 0], shared.dq)
                turn, turns = turn_of(args, work, sizes, q_run, tile - 1)
                here = visits(args, work, sizes, q_run, tile - 1, gaps)
                if visited:
                    every_lane("cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff;")
                    if step < work.steps - 1:
                        arrive(DQ_FREE, with_one_warp(2), 1)
                    next_turn(word, by)
                    step += 1


@gluon.jit
def turn_of(args, work, sizes: gl.constexpr, q_run, tile):
    """Return (turn, turns): the number of key tiles that add to a query tile's dq before the program's key tile, and in all."""
    turn = 0
    turns = 0
    for k_run in range(sizes.K_RUNS):
        if args.intervals is not None:
            count, before, _ = keys_in_intervals(args, work, sizes, q_run, k_run, tile)
        else:
            row = load_row(args.rows, q_run * sizes.K_RUNS + k_run)
            m0 = tile * sizes.BLOCK_Q
            first = gl.maximum(m0 - row.hi, 0) // sizes.BLOCK_K
            last = (gl.minimum(gl.maximum(m0 + sizes.BLOCK_Q - row.lo, 0), row.k_len) + sizes.BLOCK_K - 1) // sizes.BLOCK_K
            if args.key_ranges is not None:
                least, greatest = keys_in_extents(args, work, sizes, q_run, k_run, tile)
                first = gl.maximum(first, least)
                last = gl.minimum(last, greatest)
            some = (row.lo <= row.hi) & (m0 < row.q_len) & (m0 < row.k_len + row.hi)
            count = gl.where(some, gl.maximum(last - first, 0), 0)
            before = work.k_tile - first
        turn += gl.where(k_run < work.k_run, count, 0) + gl.where(k_run == work.k_run, before, 0)
        turns += count
    return turn, turns


@gluon.jit
def wait_for_turn(at, turn):
    """Spin until ``turn`` programs have added to the sums. The load of the counter is relaxed, because an acquire would empty the
    L1 cache at each step; a stale L1 does no harm, because TMA adds in the L2 cache."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    address = gl.full([32], 0, gl.int64, EACH) + at.to(gl.int64)
    expected = gl.full([32], 0, gl.int32, EACH) + turn
    text: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 seen; again: ld.relaxed.gpu.global.b32 seen, [$1]; setp.ne.b32 p, seen, $2; "
        "@p bra again; fence.proxy.async.global; mov.b32 $0, seen; }"
    )
    gl.inline_asm_elementwise(text, "=r,l,r,~{memory}", [address, expected], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def next_turn(at, by):
    """Wait until this program's addition is complete, then add ``by`` (1, or a value that resets it) to the turn counter."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    address = gl.full([32], 0, gl.int64, EACH) + at.to(gl.int64)
    increment = gl.full([32], 0, gl.int32, EACH) + by
    text: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 lane; cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; "
        "setp.eq.u32 p, lane, 0; @p red.release.gpu.global.add.s32 [$1], $2; mov.b32 $0, $2; }"
    )
    gl.inline_asm_elementwise(text, "=r,l,r,~{memory}", [address, increment], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hand_over(dq, tile, BLOCK_Q: gl.constexpr):
    """Store the accumulators of a step's dq to shared memory in register order, so that no data moves between threads. Register r
    of thread t in warpgroup w becomes float 4096 * w + 512 * (r // 4) + 4 * t + r % 4; ``hopper_dq`` restores the order."""
    LINES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [2, 0], [4, 0], [8, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[0, 128], [1, 0], [16, 0]],
        [],
        [32, 256],
    )
    if BLOCK_Q == 64:
        dq = dq.reshape([4, 2, 8, 2, 8, 4, 2]).permute([3, 4, 0, 2, 5, 1, 6])
    else:
        dq = dq.reshape([2, 4, 2, 8, 8, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6])
    tile.store(gl.convert_layout(dq.reshape([32, 256]), LINES, assert_trivial=True))


@constexpr_function
def layout_of_dq(block_q):
    """Return the layout of dq in two warpgroups: each holds half of dq, 64 columns of [64, 128] or 64 rows of [128, 64]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2] if block_q == 64 else [8, 1], [16, 64, 16])


@triton.jit
def hopper_dq(
    sums_RX,
    dq_BSHD,
    scale,
    S,
    H,
    D: tl.constexpr,
    Q_RUNS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load the dq sums of a query tile, undo the register order of ``hand_over``, scale them, and store them in dq's dtype."""
    q_slot = S // Q_RUNS
    tiles = tl.cdiv(q_slot, BLOCK_Q)
    program = tl.program_id(0).to(tl.int64)
    tile = program % (Q_RUNS * tiles)
    head = program // (Q_RUNS * tiles) % H
    batch = program // (Q_RUNS * tiles) // H
    row, d = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_D)[None, :]
    half = row // 64 + d // 64  # a half is 64 queries or 64 columns
    r, c = row % 64, d % 64
    thread = r // 16 * 32 + r % 8 * 4 + c % 8 // 2
    at = half * 4096 + c // 8 * 512 + thread * 4 + r // 8 % 2 * 2 + c % 2
    x = tl.load(sums_RX + program * SUMS + at) * scale
    i = tile % tiles * BLOCK_Q + row
    to = ((batch * S + tile // tiles * q_slot + i) * H + head) * D + d
    tl.store(dq_BSHD + to, x.to(dq_BSHD.dtype.element_ty), mask=(i < q_slot) & (d < D))
