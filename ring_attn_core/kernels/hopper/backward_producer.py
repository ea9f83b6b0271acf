"""The two warps that load for the Hopper backward, in Gluon: the scout and the producer.

    scout       lse2, delta, visible keys of step 0 | of step 1 | ...                    ahead of the producer
    producer    k, v | q of step 0 | dout of step 0 | q of step 1 | ...                  by TMA, each as soon as its stage is free

Both warps serve backward.py and, in the two-pass backward, wide_dkv.py. The other pass, wide_dq.py, has a separate producer,
wide_dq_producer.py.

A step is one query tile that the program visits. The scout finds these tiles. For each it stores the index of the tile's first
query, and each query's lse2 and delta; with extents also each query's first visible key and number of visible keys, in one
int32. The scout reads global memory, so it works ahead of the producer. The producer can then issue a load as soon as the
consumers release a stage (barriers.py). TMA cannot read lse2 and delta, because they are not aligned to 16 bytes. With ALiBi the
scout subtracts from lse2 the bias between each query and the program's first key.

Blank queries (plan/ring.py), which see no key, may hold NaN, and 0 times NaN is NaN. Without a sink their lse is -inf, and their
lse2 is set to inf. If a tile has an infinite lse2, its load signals ``own_full``, an mbarrier for which only the producer waits.
The producer then zeroes the rows of the blank queries and signals the consumers. With sinks lse2 is finite, and
``attend/kernels.py`` of both packages has already replaced NaN by 0.

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
from .barriers import DOUT_READ, Q_READ, acquire, allocate_barriers, allocate_numbers, read_number, sync_warp, write_number
from .parts import bring_parts, expect_parts
from .register_layouts import here, matrix, rows_by_lines

STEPS = gl.constexpr(4)
"""Number of query tiles whose data ``Steps`` holds: those that consumers read, and those that the scout has found ahead."""

WHOLE = gl.constexpr(1 << 30)
"""Flag in ``first_query``: each query of the tile sees each key of the program, so no score needs a mask."""

MASKED_ROWS = gl.constexpr(1 << 29)
"""Flag in ``first_query``: some query of the tile has an infinite lse2."""


class Steps(NamedTuple):
    """STEPS query tiles in shared memory, one per step, and the mbarriers by which the scout signals ``full`` and the producer
    ``free``. ``first_query``: index of the first query, plus the flags WHOLE and MASKED_ROWS. ``lse2``, ``delta``: f32 for each
    query."""

    first_query: Any
    lse2: Any
    delta: Any
    seen: Any
    full: Any
    free: Any


class Sources(NamedTuple):
    """The TMA descriptors of the inputs, each a ``Parts``."""

    q: Any
    dout: Any
    k: Any
    v: Any


@gluon.jit
def allocate_steps(args, sizes: gl.constexpr):
    """Allocate the ``Steps`` of a program, and initialize their mbarriers."""
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gl.static_assert(sizes.OUT_STAGES < STEPS, "the scout would not be ahead of the producer")
    lse2 = gl.allocate_shared_memory(gl.float32, [STEPS, sizes.BLOCK_Q], NUMBERS)
    seen = lse2
    if args.key_ranges is not None:
        seen = gl.allocate_shared_memory(gl.int32, [STEPS, sizes.BLOCK_Q], NUMBERS)
    steps = Steps(
        allocate_numbers(STEPS),
        lse2,
        gl.allocate_shared_memory(gl.float32, [STEPS, sizes.BLOCK_Q], NUMBERS),
        seen,
        allocate_barriers(STEPS),
        allocate_barriers(STEPS),
    )
    for each in gl.static_range(STEPS):
        mbarrier.init(steps.full.index(each), count=1)
        mbarrier.init(steps.free.index(each), count=1)
    return steps


@gluon.jit
def scout(args, shared, work, sizes: gl.constexpr):
    """Find the query tiles that the program visits, and store the data of each in ``Steps``, in shared memory."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    steps = shared.steps
    if work.steps > 0:
        step = 0
        for member in range(args.H // args.G):
            head = work.group * (args.H // args.G) + member
            for each in range(sizes.Q_RUNS):
                q_run = sizes.Q_RUNS - 1 - each
                first, last, gaps = walk_of(work, q_run)
                q_base = gl.load(args.rows + (q_run * sizes.K_RUNS + work.k_run) * ROW_FIELDS + Q_BASE)
                for t in range(last - first):
                    tile = last - 1 - t
                    if visits(args, work, sizes, q_run, tile, gaps):
                        i = tile * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [1], [0]))
                        sums = (work.batch * args.H + head).to(gl.int64) * args.S + q_base + i
                        inside = i < work.q_slot
                        if sizes.FULLY_MASKED:  # the tile may end with queries of the next run, and these may hold NaN
                            inside = i < args.S - q_base
                        lse2 = gl.load(args.lse2 + sums, mask=inside, other=0.0)
                        delta = gl.load(args.delta + sums, mask=inside, other=0.0)
                        if args.key_ranges is not None:
                            seen = seen_of_tile(args, work, sizes, q_base + i, i < work.q_slot)
                        first_query = tile * BLOCK_Q
                        if sizes.FULLY_MASKED:
                            some = gl.max((lse2 == float("inf")).to(gl.int32), 0) > 0
                            first_query |= gl.where(some, MASKED_ROWS, 0)
                        if args.key_ranges is not None and args.key_extents is None:
                            all_seen = gl.min(seen, 0) == sizes.BLOCK_K << 8
                            first_query |= gl.where(all_seen, WHOLE, 0)
                        if args.alibi_slopes is not None:
                            lse2 -= bias_of_queries(args, work, sizes, q_run, head, i)
                        at = step % STEPS
                        if step >= STEPS:
                            mbarrier.wait(steps.free.index(at), step // STEPS + 1 & 1)
                        write_number(steps.first_query, at, first_query)
                        steps.lse2.index(at).store(lse2)
                        steps.delta.index(at).store(delta)
                        if args.key_ranges is not None:
                            steps.seen.index(at).store(seen)
                        sync_warp()
                        mbarrier.arrive(steps.full.index(at), count=1)
                        step += 1


@gluon.jit
def producer(sources, args, shared, work, sizes: gl.constexpr):
    """Load k and v, then q and dout of each step (a query tile that the program visits; the warp ``scout`` lists them)."""
    STAGES: gl.constexpr = sizes.STAGES
    OUT_STAGES: gl.constexpr = sizes.OUT_STAGES
    steps = shared.steps
    if work.steps > 0:
        token = work.k_run * work.k_slot + work.n0
        full = shared.keys_full.index(0)
        expect_parts(full, sizes.BLOCK_K, sizes.BLOCK_D + sizes.TAIL_D + sizes.BLOCK_E + sizes.TAIL_E)
        bring_parts(sources.k, work.batch, token, work.group, 0, full, shared.k, 0, sizes.TAIL_D)
        bring_parts(sources.v, work.batch, token, work.group, sizes.V_COLUMN, full, shared.v, 0, sizes.TAIL_E)
        step = 0
        cleaned = gl.to_tensor(0)
        for member in range(args.H // args.G):
            head = work.group * (args.H // args.G) + member
            for each in range(sizes.Q_RUNS):
                q_run = sizes.Q_RUNS - 1 - each
                q_base = gl.load(args.rows + (q_run * sizes.K_RUNS + work.k_run) * ROW_FIELDS + Q_BASE)
                for _ in range(gl.where(q_run == 0, work.visited[0], work.visited[1])):
                    number = step % STEPS
                    mbarrier.wait(steps.full.index(number), step // STEPS & 1)
                    first_query = read_number(steps.first_query, number, 1)
                    at = [work.batch, q_base + (first_query & (MASKED_ROWS - 1)), head]
                    clean = True
                    if sizes.FULLY_MASKED:
                        clean = (first_query & MASKED_ROWS) == 0
                    stage = step % STAGES
                    if step >= STAGES:
                        acquire(Q_READ + stage, 2)
                    q_full = shared.q_full.index(stage)
                    bring_queries(sources.q, at, q_full, shared.q, stage, clean, cleaned, number, shared, sizes.TAIL_D)
                    out_stage = step % OUT_STAGES
                    if step >= OUT_STAGES:  # consumers read a step's ``Steps`` before they release its dout
                        acquire(DOUT_READ + out_stage, 2)
                        mbarrier.arrive(steps.free.index((step - OUT_STAGES) % STEPS), count=1)
                    out_full = shared.dout_full.index(out_stage)
                    bring_queries(
                        sources.dout, at, out_full, shared.dout, out_stage, clean, cleaned + 1, number, shared, sizes.TAIL_E
                    )
                    if not clean:
                        cleaned += 2
                    step += 1
        for left in range(gl.maximum(step - STAGES, 0), step):  # a program must not end between arrivals and their sync
            acquire(Q_READ + left % STAGES, 2)
        for left in range(gl.maximum(step - OUT_STAGES, 0), step):
            acquire(DOUT_READ + left % OUT_STAGES, 2)


@gluon.jit
def bring_queries(source, at, full, tiles, stage, clean, cleaned, number, shared, TAIL: gl.constexpr):
    """Load a tile of q or dout at (batch row, token, head) by TMA and signal ``full``. Unless ``clean``, zero the rows of blank
    queries, whose lse2 is infinite; ``cleaned`` counts such tiles so far."""
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
        zero_fully_masked(tiles.main, stage, shared.steps.lse2.index(number))
        if TAIL > 0:
            zero_fully_masked(tiles.tail, stage, shared.steps.lse2.index(number))
        fence_async_shared()
        sync_warp()
        mbarrier.arrive(full, count=1)


@gluon.jit
def zero_fully_masked(tiles, stage, lse2):
    """Zero each row of a q or dout tile in shared memory if its query's lse2 is infinite; eight rows at a time save registers."""
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
    """Return an int32 per query: first visible key of the program's tile (low 8 bits), number of visible keys (upper bits)."""
    at = args.key_ranges + (work.batch * sizes.K_RUNS + work.k_run).to(gl.int64) * 2 * args.S + token
    begin = gl.load(at, mask=inside, other=0)
    end = gl.load(at + args.S, mask=inside, other=0)
    begin = gl.minimum(gl.maximum(begin - work.n0, 0), sizes.BLOCK_K)
    end = gl.minimum(gl.maximum(end - work.n0, 0), sizes.BLOCK_K)
    return begin | gl.maximum(end - begin, 0) << 8


@gluon.jit
def bias_of_queries(args, work, sizes: gl.constexpr, q_run, head, i):
    """Return the ALiBi bias between each query ``i`` and the first key of the program's tile, in base 2."""
    row = load_row(args.rows, q_run * sizes.K_RUNS + work.k_run)
    slope = gl.load(args.alibi_slopes + head).to(gl.float32) * LOG2E
    return slope * (row.k_start - row.q_start + row.stride * (work.n0 - i)).to(gl.float32)
