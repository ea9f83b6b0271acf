"""The producer of the Hopper forward: one warp that takes query tiles and fills shared memory by TMA, in Gluon.

    q of every group | k of step 0 | k of step 1, v of step 0 | k of step 2, v of step 1 | ... | v of the last step

A group is a consumer warpgroup of 64 queries, a step one key tile. The producer loads tiles in the order in which consumers use
them, each as soon as its stage, a buffer in shared memory, is free (barriers.py). If the call has a key mask, the producer stores
the mask of a step's keys beside these keys.

Shapes     q_BSHD, k_BTGD as ``Parts`` of TMA descriptors, v_BTGE as a TMA descriptor, key_mask_BT f32, key_mask_spans int32
           (portable/loads.py), extents and not_finite int32 (portable/extent_lists.py)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.loads import some_hidden
from ..portable.rows import load_row
from .barriers import K_FREE, Q_FREE, V_FREE, WORK_READ, acquire, sync_warp, write_number
from .gluon import copy_tile
from .parts import bring_parts, expect_parts
from .scheduler import announce, extents_of_group, key_tiles, next_place, start_of, work_of


@gluon.jit
def producer(q_BSHD, k_BTGD, v_BTGE, args, shared, sizes: gl.constexpr):
    """Take query tiles until none is left, and load their q, k and v by TMA, in the order that the module docstring shows."""
    STAGES: gl.constexpr = sizes.STAGES
    step = gl.to_tensor(0)
    loads = gl.to_tensor(0)
    q_slot = args.S // sizes.Q_RUNS
    work = work_of(take(args), args, sizes)
    announce(work, shared)
    while work.tiles >= 0:
        if work.tiles > 0:
            group = work.head // (args.H // args.G)
            for each in gl.static_range(sizes.GROUPS):
                first, last = 0, 0
                if args.extents is not None:
                    first, last = extents_of_group(args, work, sizes, each)
                if loads > 0:
                    acquire(Q_FREE + each, 1)
                if args.extents is not None:
                    shared.extents.index(2 * each).store(first)
                    shared.extents.index(2 * each + 1).store(last)
                    sync_warp()
                full = shared.q_full.index(each)
                expect_parts(full, 64, sizes.BLOCK_D + sizes.TAIL_D)
                token = work.q_run * q_slot + work.m0 + each * 64
                bring_parts(q_BSHD, work.batch, token, work.head, 0, full, shared.q, each, sizes.TAIL_D)
            loads += 1
            at = [work.batch, work.first_token, group, 0]
            first_key = 0
            if args.intervals is not None:
                first_key = work.first_token - load_row(args.rows, work.q_run * sizes.K_RUNS + work.first_run).k_base
            fill_keys(k_BTGD, args, shared, at, step, sizes, first_key)
            began = step
            before = 0
            for run in range(work.first_run, sizes.K_RUNS):
                pair = work.q_run * sizes.K_RUNS + run
                tiles = key_tiles(args, work.batch, pair, work.m0, sizes)
                k_base = load_row(args.rows, pair).k_base
                place = start_of(args, work.batch, pair, work.m0, sizes)
                for t in range(tiles.last - tiles.first):
                    place = next_place(place, t, tiles, args)
                    token = k_base + place.tile * sizes.BLOCK_K
                    if step > began:
                        at = [work.batch, token, group, 0]
                        fill_keys(k_BTGD, args, shared, at, step, sizes, place.tile * sizes.BLOCK_K)
                        at = [work.batch, before, group, sizes.V_COLUMN]
                        fill_values(v_BTGE, shared, at, step - 1, sizes)
                    before = token
                    step += 1
            at = [work.batch, before, group, sizes.V_COLUMN]
            fill_values(v_BTGE, shared, at, step - 1, sizes)
        work = work_of(take(args), args, sizes)
        acquire(WORK_READ, sizes.GROUPS)
        announce(work, shared)
    # A program must not end between the arrivals at a named barrier and its sync.
    acquire(WORK_READ, sizes.GROUPS)
    if loads > 0:
        for each in gl.static_range(sizes.GROUPS):
            acquire(Q_FREE + each, 1)
    for left in range(gl.maximum(step - STAGES, 0), step):
        acquire(K_FREE + left % STAGES, sizes.GROUPS)
        acquire(V_FREE + left % STAGES, sizes.GROUPS)


@gluon.jit
def take(args):
    """Return a new ticket, the number of a query tile that no program has taken; atomically add 1 to the global counter."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    address = gl.full([32], 0, gl.int64, EACH) + args.tickets.to(gl.int64)
    text: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.b32 $0, 0; "
        "@p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }"
    )
    ticket = gl.inline_asm_elementwise(text, "=&r,l,~{memory}", [address], dtype=gl.int32, is_pure=False, pack=1)
    return gl.max(ticket, 0)


@gluon.jit
def fill_keys(k_BTGD, args, shared, at, step, sizes: gl.constexpr, n0=0):
    """Load a step's keys by TMA and store its key mask, with extents its flag of infinite or NaN values (forward) or keys (dq).
    Mask and flag are loaded before the stage is free, to hide the latency. Consumers of the forward read a flag after they
    release its keys: hence two flags for each stage. ``n0``: first key, stored with key extents."""
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
    some_nan = False
    if args.not_finite is not None:
        some_nan = some_hidden(args.not_finite, at[0] * args.G + at[2], args.T, at[1], BLOCK_K)
    if step >= sizes.STAGES:
        acquire(K_FREE + stage, sizes.GROUPS)
    if args.not_finite is not None:
        write_number(shared.not_finite, step % (2 * sizes.STAGES), some_nan.to(gl.int32))
        if args.intervals is not None:
            write_number(shared.first_key, step % (2 * sizes.STAGES), n0)
        if args.key_mask is None:
            sync_warp()
    if args.key_mask is not None:
        write_number(shared.some_hidden, stage, some.to(gl.int32))
        if some:
            shared.key_mask.index(stage).store(most)
        sync_warp()
    full = shared.k_full.index(stage)
    expect_parts(full, BLOCK_K, sizes.BLOCK_D + sizes.TAIL_D)
    bring_parts(k_BTGD, at[0], at[1], at[2], 0, full, shared.k, stage, sizes.TAIL_D)


@gluon.jit
def fill_values(v_BTGE, shared, at, step, sizes: gl.constexpr):
    """Load the values of a step by TMA, as soon as their stage is free."""
    stage = step % sizes.STAGES
    if step >= sizes.STAGES:
        acquire(V_FREE + stage, sizes.GROUPS)
    mbarrier.expect(shared.v_full.index(stage), 2 * sizes.BLOCK_K * sizes.BLOCK_E)
    copy_tile(v_BTGE, at, shared.v_full.index(stage), shared.v.index(stage))
