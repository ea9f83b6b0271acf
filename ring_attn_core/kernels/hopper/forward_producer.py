"""The producer of the Hopper forward: one warp that takes query tiles and fills shared memory by TMA, in Gluon.

    q of every group | k of step 0 | k of step 1, v of step 0 | k of step 2, v of step 1 | ... | v of the last step

The loads are in the order of their use by the consumers, each as soon as its stage is free (barriers.py). With the keys of a step
the producer stores their key mask.

Shapes     q_BSHD, k_BTGD, v_BTGE as TMA descriptors, key_mask_BT f32, key_mask_spans int32 (portable/loads.py)
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# (pyright takes compile-time constants for the class constexpr, and jitted functions for plain ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.loads import some_hidden
from ..portable.rows import load_row
from .barriers import K_FREE, Q_FREE, V_FREE, WORK_READ, acquire, sync_warp, write_number
from .gluon import copy_tile
from .scheduler import announce, key_tiles, tile_at, work_of


@gluon.jit
def producer(q_BSHD, k_BTGD, v_BTGE, args, shared, sizes: gl.constexpr):
    """Take one query tile after the other; load q, then the keys of each step and the values of the step before, by TMA."""
    STAGES: gl.constexpr = sizes.STAGES
    step = gl.to_tensor(0)
    loads = gl.to_tensor(0)
    q_slot = args.S // sizes.Q_RUNS
    work = work_of(take(args), args, sizes)
    announce(work, shared)
    while work.tiles >= 0:
        if work.tiles > 0:
            group = work.head // (sizes.H // sizes.G)
            for each in gl.static_range(sizes.GROUPS):
                if loads > 0:
                    acquire(Q_FREE + each, 1)
                mbarrier.expect(shared.q_full.index(each), 128 * sizes.BLOCK_D)
                at = [work.batch, work.q_run * q_slot + work.m0 + each * 64, work.head, 0]
                copy_tile(q_BSHD, at, shared.q_full.index(each), shared.q.index(each))
            loads += 1
            at = [work.batch, work.first_token, group, 0]
            fill_keys(k_BTGD, args, shared, at, step, sizes)
            began = step
            before = 0
            for run in range(work.first_run, sizes.K_RUNS):
                pair = work.q_run * sizes.K_RUNS + run
                tiles = key_tiles(args, work.batch, pair, work.m0, sizes)
                k_base = load_row(args.rows, pair).k_base
                for t in range(tiles.last - tiles.first):
                    token = k_base + tile_at(t, tiles) * sizes.BLOCK_K
                    if step > began:
                        fill_keys(k_BTGD, args, shared, [work.batch, token, group, 0], step, sizes)
                        at = [work.batch, before, group, sizes.V_COLUMN]
                        fill_values(v_BTGE, shared, at, step - 1, sizes)
                    before = token
                    step += 1
            at = [work.batch, before, group, sizes.V_COLUMN]
            fill_values(v_BTGE, shared, at, step - 1, sizes)
        work = work_of(take(args), args, sizes)
        acquire(WORK_READ, sizes.GROUPS)
        announce(work, shared)
    # No named barrier may stay partly arrived at.
    acquire(WORK_READ, sizes.GROUPS)
    if loads > 0:
        for each in gl.static_range(sizes.GROUPS):
            acquire(Q_FREE + each, 1)
    for left in range(gl.maximum(step - STAGES, 0), step):
        acquire(K_FREE + left % STAGES, sizes.GROUPS)
        acquire(V_FREE + left % STAGES, sizes.GROUPS)


@gluon.jit
def take(args):
    """Take a ticket from the global counter: the number of the first query tile that no program has taken yet."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    address = gl.full([32], 0, gl.int64, EACH) + args.tickets.to(gl.int64)
    text: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.b32 $0, 0; "
        "@p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }"
    )
    ticket = gl.inline_asm_elementwise(text, "=&r,l,~{memory}", [address], dtype=gl.int32, is_pure=False, pack=1)
    return gl.max(ticket, 0)


@gluon.jit
def fill_keys(k_BTGD, args, shared, at, step, sizes: gl.constexpr):
    """Load the keys of a step by TMA, and their key mask, which is read before the stage is free to hide its latency."""
    BLOCK_K: gl.constexpr = sizes.BLOCK_K
    stage = step % sizes.STAGES
    some = False
    if args.key_mask is not None:
        LINE: gl.constexpr = gl.BlockedLayout([BLOCK_K // 32], [32], [1], [0])
        j = at[1] + gl.arange(0, BLOCK_K, LINE)
        some = some_hidden(args.key_mask_spans, at[0], args.T, at[1], BLOCK_K)
        most = gl.full([BLOCK_K], float("inf"), gl.float32, LINE)
        if some:
            most = gl.load(args.key_mask + at[0].to(gl.int64) * args.T + j, mask=j < args.T, other=-float("inf"))
    if step >= sizes.STAGES:
        acquire(K_FREE + stage, sizes.GROUPS)
    if args.key_mask is not None:
        write_number(shared.some_hidden, stage, some.to(gl.int32))
        if some:
            shared.key_mask.index(stage).store(most)
        sync_warp()
    mbarrier.expect(shared.k_full.index(stage), 2 * BLOCK_K * sizes.BLOCK_D)
    copy_tile(k_BTGD, at, shared.k_full.index(stage), shared.k.index(stage))


@gluon.jit
def fill_values(v_BTGE, shared, at, step, sizes: gl.constexpr):
    """Load the values of a step by TMA, once their stage is free."""
    stage = step % sizes.STAGES
    if step >= sizes.STAGES:
        acquire(V_FREE + stage, sizes.GROUPS)
    mbarrier.expect(shared.v_full.index(stage), 2 * sizes.BLOCK_K * sizes.BLOCK_E)
    copy_tile(v_BTGE, at, shared.v_full.index(stage), shared.v.index(stage))
