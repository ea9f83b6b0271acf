"""The producer of dq in the two-pass Hopper backward, in Gluon: one warp that takes query tiles and fills shared memory.

    q, dout, lse2, delta of both groups | k, v of step 0 | k, v of step 1 | ...

A group is a consumer warpgroup of 64 queries, a step one key tile. TMA loads tiles in the order in which consumers use them, each
as soon as its stage, a buffer in shared memory, is free (barriers.py). The producer itself stores lse2, delta and extents. For
the keys of each step it also stores the key mask, and a flag that says whether some keys are not finite.

Shapes     ``sources``: q_BSHD, dout_BSHE, k_BTGD, v_BTGE as ``Parts`` of TMA descriptors; lse2_BHS, delta_BHS f32
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.rows import load_row
from .barriers import K_FREE, Q_FREE, V_FREE, WORK_READ, acquire, sync_warp
from .forward_producer import fill_keys, take
from .parts import bring_parts, expect_parts
from .scheduler import announce, extents_of_group, key_tiles, next_place, start_of, work_of


@gluon.jit
def producer(sources, args, shared, sizes: gl.constexpr):
    """Take query tiles until none is left; load the q, dout, lse2, delta and extents of each, then k and v of each step."""
    step = gl.to_tensor(0)
    loads = gl.to_tensor(0)
    work = work_of(take(args), args, sizes)
    announce(work, shared)
    while work.tiles >= 0:
        if work.tiles > 0:
            for each in gl.static_range(sizes.GROUPS):
                fill_queries(sources, args, shared, work, loads, sizes, each)
            loads += 1
            group = work.head // (args.H // args.G)
            for run in range(work.first_run, sizes.K_RUNS):
                pair = work.q_run * sizes.K_RUNS + run
                tiles = key_tiles(args, work.batch, pair, work.m0, sizes)
                k_base = load_row(args.rows, pair).k_base
                place = start_of(args, work.batch, pair, work.m0, sizes)
                for t in range(tiles.last - tiles.first):
                    place = next_place(place, t, tiles, args)
                    n0 = place.tile * sizes.BLOCK_K
                    token = k_base + n0
                    fill_keys(sources.k, args, shared, [work.batch, token, group, 0], step, sizes, n0)
                    stage = step % sizes.V_STAGES
                    if step >= sizes.V_STAGES:
                        acquire(V_FREE + stage, sizes.GROUPS)
                    full = shared.v_full.index(stage)
                    expect_parts(full, sizes.BLOCK_K, sizes.BLOCK_E + sizes.TAIL_E)
                    bring_parts(sources.v, work.batch, token, group, sizes.V_COLUMN, full, shared.v, stage, sizes.TAIL_E)
                    step += 1
        work = work_of(take(args), args, sizes)
        acquire(WORK_READ, sizes.GROUPS)
        announce(work, shared)
    # A program must not end between the arrivals at a named barrier and its sync.
    acquire(WORK_READ, sizes.GROUPS)
    if loads > 0:
        for each in gl.static_range(sizes.GROUPS):
            acquire(Q_FREE + each, 1)
    for left in range(gl.maximum(step - sizes.STAGES, 0), step):
        acquire(K_FREE + left % sizes.STAGES, sizes.GROUPS)
    for left in range(gl.maximum(step - sizes.V_STAGES, 0), step):
        acquire(V_FREE + left % sizes.V_STAGES, sizes.GROUPS)


@gluon.jit
def fill_queries(sources, args, shared, work, loads, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Load q and dout of a warpgroup's 64 queries by TMA; store their lse in base 2, delta and extents."""
    row = load_row(args.rows, work.q_run * sizes.K_RUNS)
    i = work.m0 + 64 * GROUP + gl.arange(0, 64, gl.BlockedLayout([2], [32], [1], [0]))
    at = (work.batch * args.H + work.head).to(gl.int64) * args.S + row.q_base + i
    lse2 = gl.load(args.lse2 + at, mask=i < row.q_len, other=float("inf"))
    delta = gl.load(args.delta + at, mask=i < row.q_len, other=0.0)
    first, last = 0, 0
    if shared.extents is not None:
        first, last = extents_of_group(args, work, sizes, GROUP)
    if loads > 0:
        acquire(Q_FREE + GROUP, 1)
    shared.lse2.index(GROUP).store(lse2)
    shared.delta.index(GROUP).store(delta)
    if shared.extents is not None:
        shared.extents.index(2 * GROUP).store(first)
        shared.extents.index(2 * GROUP + 1).store(last)
    sync_warp()
    full = shared.q_full.index(GROUP)
    expect_parts(full, 64, sizes.BLOCK_D + sizes.TAIL_D + sizes.BLOCK_E + sizes.TAIL_E)
    token = work.q_run * (args.S // sizes.Q_RUNS) + work.m0 + GROUP * 64
    bring_parts(sources.q, work.batch, token, work.head, 0, full, shared.q, GROUP, sizes.TAIL_D)
    bring_parts(sources.dout, work.batch, token, work.head, 0, full, shared.dout, GROUP, sizes.TAIL_E)
