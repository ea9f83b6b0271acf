"""The gradient dq in the two-pass backward (``tile_sizes.hopper_passes``), in Gluon for Hopper (sm_90a).

    s = q k^T     p = exp2(s - lse2)     dp = dout v^T     ds = p (dp - delta)     dq += ds k

The kernel computes the dq of portable/backward_dq.py; dk and dv have a separate launch (wide_dkv.py). The two launches compute 7
products, backward.py only 5. In return dq stays in registers, and no program waits for another. Two runs give the same bits.

Shapes     as in portable/backward_dq.py; q, dout, k and v are read through TMA descriptors, in one part or two (parts.py)
Program    one per multiprocessor, persistent: it takes tiles of 128 queries by tickets (scheduler.py). Two warpgroups share the
           key tiles, which the producer warp loads by TMA; with IN_REGISTERS the producer loads the next queries early
Pipeline   k and v have STAGES and V_STAGES stages. While one warpgroup computes ds, products of the other fill the tensor cores
K tiles    as in forward.py
State      dq starts at 0 if FIRST, else at dq_in f32, which dq may overwrite. At the ring's last step dq gets the input's dtype
Precision  products in the input dtype, sums in f32; ds is rounded once to the input dtype
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..portable.rows import count_partly_seen, partly_seen
from .backward_producer import Sources
from .barriers import (
    FORWARD_STAGES,
    K_FREE,
    Q_FREE,
    V_FREE,
    WORK_READ,
    allocate_barriers,
    allocate_numbers,
    read_number,
    release,
)
from .dropout import keep_mask_of_tile
from .forward_softmax import hide_unseen
from .gluon import wait_for_products
from .instructions import packed_half, special_tanh
from .parts import (
    Parts,
    allocate_parts,
    in_registers,
    multiply_add,
    multiply_transposed,
    tile_of,
    wait_for_sum,
    zeros_of_parts,
)
from .register_layouts import accumulator, by_eights, column, here, rows_and_columns, rows_by_lines
from .scheduler import NUMBERS, await_tile, run_of, tile_at, visible, visible_by_key
from .wide_dq_producer import producer


class DqConstants(NamedTuple):
    """The constants of ``hopper_wide_dq``; q and k tiles have BLOCK_D + TAIL_D columns, v and dout tiles BLOCK_E + TAIL_E."""

    D: Any
    V_COLUMN: Any
    Q_RUNS: Any
    K_RUNS: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    BLOCK_D: Any
    TAIL_D: Any
    BLOCK_E: Any
    TAIL_E: Any
    GROUPS: Any
    STAGES: Any
    V_STAGES: Any
    IN_REGISTERS: Any
    FIRST: Any
    ZERO_MASKED: Any
    FULLY_MASKED: Any
    ALIGNED: Any


class DqArguments(NamedTuple):
    """The arguments of ``hopper_wide_dq`` without TMA descriptors, None if absent. ``tickets``: counter of query tiles taken.
    ``total``: number of query tiles. ``together``: heads taken at a time."""

    rows: Any
    extents: Any
    key_extents: Any
    key_tiles: Any
    intervals: Any
    tile_order: Any
    not_finite: Any
    key_mask: Any
    key_mask_spans: Any
    alibi_slopes: Any
    dropout: Any
    lse2: Any
    delta: Any
    dq_in: Any
    dq: Any
    scale: Any
    inner: Any
    softcap: Any
    threshold: Any
    rescale: Any
    S: Any
    T: Any
    H: Any
    G: Any
    tickets: Any
    together: Any
    total: Any


class DqSharedMemory(NamedTuple):
    """Arrays for queries (``q`` to ``extents``), k, v, dq (``out``) and numbers (``key_mask`` to ``work``), and mbarriers."""

    q: Any
    dout: Any
    lse2: Any
    delta: Any
    extents: Any
    k: Any
    v: Any
    out: Any
    key_mask: Any
    some_hidden: Any
    not_finite: Any
    first_key: Any
    work: Any
    q_full: Any
    k_full: Any
    v_full: Any
    work_full: Any


@gluon.jit
def hopper_wide_dq(
    q_BSHD,
    q_tail_BSHD,
    dout_BSHE,
    dout_tail_BSHE,
    k_BTGD,
    k_tail_BTGD,
    v_BTGE,
    v_tail_BTGE,
    key_mask_spans_ptr,
    lse2_BHS,
    delta_BHS,
    rows_ptr,
    extents_ptr,
    key_extents_ptr,
    key_mask_BT,
    alibi_slopes_ptr,
    dropout_BH,
    key_tiles_ptr,
    intervals_ptr,
    tile_order_ptr,
    not_finite_ptr,
    dq_in_BSHD,
    tickets_in_ptr,
    dq_BSHD,
    tickets_ptr,
    scale,
    inner,
    softcap,
    threshold,
    rescale,
    S,
    T,
    together,
    total,
    H,
    G,
    D: gl.constexpr,
    V_COLUMN: gl.constexpr,
    Q_RUNS: gl.constexpr,
    K_RUNS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_D: gl.constexpr,
    TAIL_D: gl.constexpr,
    BLOCK_E: gl.constexpr,
    TAIL_E: gl.constexpr,
    STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    FIRST: gl.constexpr,
    ZERO_MASKED: gl.constexpr,
    FULLY_MASKED: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    GROUPS: gl.constexpr = BLOCK_Q // 64
    gl.static_assert(V_STAGES <= STAGES and STAGES <= FORWARD_STAGES and GROUPS == 2, "named barriers overlap")
    sizes: gl.constexpr = DqConstants(
        D, V_COLUMN, Q_RUNS, K_RUNS, BLOCK_Q, BLOCK_K, BLOCK_D, TAIL_D, BLOCK_E, TAIL_E, GROUPS, STAGES, V_STAGES,
        IN_REGISTERS, FIRST, ZERO_MASKED, FULLY_MASKED, ALIGNED,
    )  # fmt: skip
    args = DqArguments(
        rows_ptr, extents_ptr, key_extents_ptr, key_tiles_ptr, intervals_ptr, tile_order_ptr, not_finite_ptr, key_mask_BT,
        key_mask_spans_ptr, alibi_slopes_ptr, dropout_BH, lse2_BHS, delta_BHS, dq_in_BSHD, dq_BSHD, scale, inner, softcap,
        threshold, rescale, S, T, H, G, tickets_ptr, together, total,
    )  # fmt: skip
    q_parts, dout_parts = Parts(q_BSHD, q_tail_BSHD), Parts(dout_BSHE, dout_tail_BSHE)
    sources = Sources(q_parts, dout_parts, Parts(k_BTGD, k_tail_BTGD), Parts(v_BTGE, v_tail_BTGE))
    q = allocate_parts(sources.q, GROUPS, 64, BLOCK_D, TAIL_D)
    out = q
    if IN_REGISTERS:
        out = allocate_parts(sources.q, GROUPS, 64, BLOCK_D, TAIL_D)
    key_mask, some_hidden, not_finite, first_key, extents = None, None, None, None, None
    if not_finite_ptr is not None:
        not_finite = allocate_numbers(2 * STAGES)
    if intervals_ptr is not None:
        first_key = allocate_numbers(2 * STAGES)
    if extents_ptr is not None and IN_REGISTERS:  # no room in shared memory beside tiles of 256 columns
        extents = gl.allocate_shared_memory(gl.int32, [2 * GROUPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if key_mask_BT is not None:
        key_mask = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        some_hidden = allocate_numbers(STAGES)
    shared = DqSharedMemory(
        q,
        allocate_parts(sources.dout, GROUPS, 64, BLOCK_E, TAIL_E),
        gl.allocate_shared_memory(gl.float32, [GROUPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.float32, [GROUPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        extents,
        allocate_parts(sources.k, STAGES, BLOCK_K, BLOCK_D, TAIL_D),
        allocate_parts(sources.v, V_STAGES, BLOCK_K, BLOCK_E, TAIL_E),
        out,
        key_mask,
        some_hidden,
        not_finite,
        first_key,
        allocate_numbers(NUMBERS),
        allocate_barriers(GROUPS),
        allocate_barriers(STAGES),
        allocate_barriers(V_STAGES),
        allocate_barriers(1),
    )
    mbarrier.init(shared.work_full.index(0), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(shared.q_full.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(stage), count=1)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(shared.v_full.index(stage), count=1)
    gl.warp_specialize(
        [
            (consumer, (args, shared, sizes, 0)),
            (consumer, (args, shared, sizes, 1)),
            (producer, (sources, args, shared, sizes)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


class DqQueries(NamedTuple):
    """The 64 queries of a warpgroup: q, dout, local indices ``i``, lse in base 2 and delta. Without IN_REGISTERS q and dout are
    in shared memory, and ``lse2`` and ``delta`` are placeholders."""

    q: Any
    dout: Any
    i: Any
    lse2: Any
    delta: Any


@gluon.jit
def consumer(args, shared, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Compute dq of this warpgroup's 64 queries in each query tile, until the producer announces that no tile is left."""
    taken = gl.to_tensor(0)
    loads = gl.to_tensor(0)
    step = gl.to_tensor(0)
    work = await_tile(taken, shared)
    while work.tiles >= 0:
        dq = zeros_of_parts(64, sizes.BLOCK_D, sizes.TAIL_D)
        if work.tiles > 0:
            step, dq = sum_of_keys(step, dq, loads, shared, args, work, sizes, GROUP)
            loads += 1
        if not sizes.IN_REGISTERS:
            work = await_tile(taken, shared)  # read again: held during the products, it would take registers
        out = tile_of(shared.out, GROUP, sizes.TAIL_D)
        finish(dq.main, out.main, 0, args, work, sizes, GROUP)
        if sizes.TAIL_D > 0:
            finish(dq.tail, out.tail, sizes.BLOCK_D, args, work, sizes, GROUP)
        if not sizes.IN_REGISTERS:  # ``finish`` stored dq by way of q's shared memory
            fence_async_shared()
            if work.tiles > 0:
                release(Q_FREE + GROUP, 1)
        if not sizes.IN_REGISTERS or work.tiles == 0:
            release(WORK_READ, sizes.GROUPS)
        taken += 1
        work = await_tile(taken, shared)
    release(WORK_READ, sizes.GROUPS)


@gluon.jit
def sum_of_keys(step, dq, loads, shared, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Add ds k of all key tiles of the query tile to dq; return the number of the next step (key tile), and dq."""
    S_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_K)
    i = work.m0 + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    mbarrier.wait(shared.q_full.index(GROUP), loads & 1)
    q = tile_of(shared.q, GROUP, sizes.TAIL_D)
    dout = tile_of(shared.dout, GROUP, sizes.TAIL_E)
    lse2, delta = 0.0, 0.0
    if sizes.IN_REGISTERS:
        q, dout = in_registers(q, S_LAYOUT, sizes.TAIL_D), in_registers(dout, S_LAYOUT, sizes.TAIL_E)
        lse2 = shared.lse2.index(GROUP).load(gl.SliceLayout(1, S_LAYOUT))
        delta = shared.delta.index(GROUP).load(gl.SliceLayout(1, S_LAYOUT))
    queries = DqQueries(q, dout, i, lse2, delta)
    if sizes.IN_REGISTERS:
        run = run_of(args, shared, loads, work, sizes, work.first_run, i, GROUP)
        n0 = tile_at(0, run.tiles) * sizes.BLOCK_K
        step, dq = visit_keys(step, dq, queries, run, n0, shared, args, work, sizes, True, GROUP)
        if args.extents is None or sizes.K_RUNS == 1:
            release(Q_FREE + GROUP, 1)  # all loads of these arrays have ended, because their values were used
        release(WORK_READ, sizes.GROUPS)
    for number in range(work.first_run, sizes.K_RUNS):
        done = 0
        if sizes.IN_REGISTERS:
            done = gl.where(number == work.first_run, 1, 0)
        if not sizes.IN_REGISTERS or sizes.K_RUNS > 1:
            run = run_of(args, shared, loads, work, sizes, number, i, GROUP)
        masked = count_partly_seen(run.tiles)
        for t in range(done, masked):
            n0 = partly_seen(t, run.tiles) * sizes.BLOCK_K
            step, dq = visit_keys(step, dq, queries, run, n0, shared, args, work, sizes, True, GROUP)
        for t in range(gl.maximum(done - masked, 0), run.tiles.whole_last - run.tiles.whole_first):
            n0 = (run.tiles.whole_last - 1 - t) * sizes.BLOCK_K
            step, dq = visit_keys(step, dq, queries, run, n0, shared, args, work, sizes, False, GROUP)
    if sizes.IN_REGISTERS and args.extents is not None and sizes.K_RUNS > 1:
        release(Q_FREE + GROUP, 1)
    if sizes.FULLY_MASKED:
        if not sizes.IN_REGISTERS:
            lse2 = shared.lse2.index(GROUP).load(gl.SliceLayout(1, S_LAYOUT))
        dq = zero_fully_masked(dq, lse2, sizes.TAIL_D)
    return step, dq


@gluon.jit
def zero_fully_masked(dq, lse2, TAIL: gl.constexpr):
    """Return dq, zeroed for fully masked queries without a sink; their lse2 is infinite, and their q and dout may hold NaN."""
    MAIN: gl.constexpr = dq.main.type.layout
    main = gl.where(column(lse2, MAIN) < float("inf"), dq.main, 0.0)
    tail = dq.tail
    if TAIL > 0:
        OF_TAIL: gl.constexpr = dq.tail.type.layout
        tail = gl.where(column(lse2, OF_TAIL) < float("inf"), dq.tail, 0.0)
    return Parts(main, tail)


@gluon.jit
def visit_keys(
    step, dq, queries, run, n0, shared, args, work, sizes: gl.constexpr, MASKED: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Add the product ds k of one key tile to dq; return the number of the next step, and dq."""
    BLOCK_K: gl.constexpr = sizes.BLOCK_K
    E_PARTS: gl.constexpr = 2 if sizes.TAIL_E > 0 else 1
    S_LAYOUT: gl.constexpr = accumulator(BLOCK_K)
    q, dout, i, lse2, delta = queries
    if not sizes.IN_REGISTERS:
        q = tile_of(shared.q, here(gl.to_tensor(GROUP)), sizes.TAIL_D)
        dout = tile_of(shared.dout, here(gl.to_tensor(GROUP)), sizes.TAIL_E)
    stage, v_stage = step % sizes.STAGES, step % sizes.V_STAGES
    mbarrier.wait(shared.k_full.index(stage), step // sizes.STAGES & 1)
    if args.intervals is not None and (MASKED or args.alibi_slopes is not None or args.dropout is not None):
        n0 = read_number(shared.first_key, step % (2 * sizes.STAGES))
    k = tile_of(shared.k, stage, sizes.TAIL_D)
    s = multiply_transposed(q, k, 64, BLOCK_K, sizes.TAIL_D)
    mbarrier.wait(shared.v_full.index(v_stage), step // sizes.V_STAGES & 1)
    dp = multiply_transposed(dout, tile_of(shared.v, v_stage, sizes.TAIL_E), 64, BLOCK_K, sizes.TAIL_E)
    s = wait_for_products(E_PARTS, deps=[s])
    factor = 1.0
    if args.softcap is None:
        s *= args.inner
    else:
        s = special_tanh(s * args.inner)
        factor = 1.0 - s * s
        s *= args.softcap
    if args.key_mask is not None:  # noqa: SIM102 (known when compiled)
        if read_number(shared.some_hidden, stage) != 0:
            s = gl.minimum(s, gl.expand_dims(shared.key_mask.index(stage).load(gl.SliceLayout(0, S_LAYOUT)), 0))
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, S_LAYOUT))
    if args.alibi_slopes is not None:
        ahead = gl.expand_dims((run.stride * columns).to(gl.float32), 0)
        ahead -= gl.expand_dims((run.q_start - run.k_start + run.stride * (i - n0)).to(gl.float32), 1)
        s += ahead * run.slope
    if not sizes.IN_REGISTERS:
        lse2 = shared.lse2.index(GROUP).load(gl.SliceLayout(1, S_LAYOUT))
        delta = shared.delta.index(GROUP).load(gl.SliceLayout(1, S_LAYOUT))
    p = gl.exp2(s - gl.expand_dims(lse2, 1))
    dp = wait_for_products(0, deps=[dp])
    release(V_FREE + v_stage, sizes.GROUPS)
    some_nan = True
    if MASKED and args.not_finite is not None:
        some_nan = read_number(shared.not_finite, step % (2 * sizes.STAGES)) != 0
    if args.dropout is not None:
        stream = gl.load(args.dropout + work.batch * args.H + work.head)
        keep = keep_mask_of_tile(
            stream, args.threshold, i, work.m0 + GROUP * 64, n0, run.q_start, run.k_start, run.stride, BLOCK_K, sizes.ALIGNED
        )
        dp = gl.where(keep, dp * args.rescale, 0.0)
    ds = p * (dp - gl.expand_dims(delta, 1))
    if args.softcap is not None:
        ds *= factor
    if MASKED:
        ds = gl.where(visible(columns, run.begin - n0, run.end - n0), ds, 0.0)
        if args.key_extents is not None:
            ds = gl.where(visible_by_key(columns, i, n0, run, args, work), ds, 0.0)
        if sizes.ZERO_MASKED > 0 and some_nan:
            hide_unseen(k.main, run, n0, args, work, sizes, GROUP)
            if sizes.TAIL_D > 0:
                hide_unseen(k.tail, run, n0, args, work, sizes, GROUP)
    dq, half = multiply_add(dq, packed_half(ds, shared.q.main.dtype), k, sizes.TAIL_D)
    dq, half = wait_for_sum(0, dq, half, sizes.TAIL_D)
    release(K_FREE + stage, sizes.GROUPS)
    return step + 1, dq


@gluon.jit
def finish(x, tile, COLUMN: gl.constexpr, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Store scale times ``x``, plus the dq of earlier steps unless FIRST, in the columns of dq from COLUMN on."""
    COLUMNS: gl.constexpr = x.shape[1]
    DTYPE: gl.constexpr = args.dq.dtype.element_ty
    x *= args.scale
    first = work.batch.to(gl.int64) * args.S + work.q_run * (args.S // sizes.Q_RUNS) + work.m0 + GROUP * 64
    offset = (first * args.H + work.head) * sizes.D + COLUMN
    limit = args.S // sizes.Q_RUNS - work.m0 - GROUP * 64
    if not sizes.FIRST or DTYPE.is_fp32():
        row, each = rows_and_columns(64, COLUMNS)
        x = by_eights(x)
        inside = (row < limit) & (COLUMN + each < sizes.D)
        at = row * (args.H * sizes.D) + each
        if not sizes.FIRST:
            x += gl.load(args.dq_in + offset + at, mask=inside, other=0.0)
        gl.store(args.dq + offset + at, x.to(DTYPE), mask=inside)
    else:
        LINES: gl.constexpr = rows_by_lines(COLUMNS)
        row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LINES)), 1)
        each = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, LINES)), 0)
        tile.store(x.to(DTYPE))
        at = args.dq + offset + (row * (args.H * sizes.D) + each)
        gl.store(at, tile.load(LINES), mask=(row < limit) & (COLUMN + each < sizes.D))
