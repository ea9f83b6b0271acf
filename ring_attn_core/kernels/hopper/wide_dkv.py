"""The gradients dk and dv in the two-pass backward (``tile_sizes.hopper_passes``), in Gluon for Hopper (sm_90a).

    s^T = k q^T     p^T = exp2(s^T - lse2)     dv += p^T dout              the first warpgroup
    dp^T = v dout^T     ds^T = p^T (dp^T - delta)     dk += ds^T q         the second warpgroup

The sums dk and dv of 64 keys with heads of 256 fill the registers of two warpgroups. So each warpgroup computes two products,
and p^T passes from the first to the second through shared memory, in float32. While one warpgroup computes exponentials or ds,
the products of the other fill the tensor cores. dq has a separate launch (wide_dq.py).

Shapes     as in portable/backward_dkv.py; q, dout, k and v are read through TMA descriptors, in one part or two (parts.py)
Program    one for each (tile of 64 keys, key head, batch row). It visits the queries that see these keys, in every query head of
           the group
Pipeline   q and dout have STAGES stages. The first warpgroup runs k q^T of the next tile together with this tile's
           product for dv. The second runs v dout^T of the next tile together with this tile's product for dk
Extents    as in backward.py, but a tile in which each query sees each key (flag WHOLE) needs no mask
ALiBi      as in backward.py
Dropout    as in backward.py: the sign of p holds the dropout mask
Tiles      BLOCK_Q, BLOCK_K, STAGES and IN_REGISTERS (products take k and v from registers) come from wide_launches.py
Precision  products in the input dtype, sums in f32; p and ds are rounded once to the input dtype
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.loads import some_hidden
from .backward import BackwardArguments, run_of, visible
from .backward_dkv import finish, hide_unseen, keys_seen_by_some
from .backward_producer import MASKED_ROWS, STEPS, WHOLE, Sources, allocate_steps, producer, scout
from .backward_scheduler import keys_of_program, query_tiles, survey
from .barriers import (
    BACKWARD_STAGES,
    DOUT_READ,
    P_FULL,
    P_READ,
    Q_READ,
    allocate_barriers,
    among_consumers,
    arrive,
    read_number,
    release,
    sync,
)
from .dropout import keep_mask_of_keys
from .gluon import wait_for_products
from .instructions import packed_half, special_tanh
from .parts import Parts, allocate_parts, in_registers, multiply_add, multiply_transposed, tile_of, wait_for_sum, zeros_of_parts
from .register_layouts import accumulator


class WideConstants(NamedTuple):
    """The constants of ``hopper_wide_dkv``; q and k tiles have BLOCK_D + TAIL_D columns, v and dout tiles BLOCK_E + TAIL_E."""

    D: Any
    E: Any
    K_STRIDE: Any
    V_STRIDE: Any
    V_COLUMN: Any
    Q_RUNS: Any
    K_RUNS: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    BLOCK_D: Any
    TAIL_D: Any
    BLOCK_E: Any
    TAIL_E: Any
    FIRST: Any
    ZERO_MASKED: Any
    FULLY_MASKED: Any
    ALIGNED: Any
    STAGES: Any
    OUT_STAGES: Any
    IN_REGISTERS: Any


class WideSharedMemory(NamedTuple):
    """The tiles in shared memory, and the mbarriers ``*_full`` of their loads. The first warpgroup passes ``p`` to the second;
    only the producer waits for ``own_full``."""

    q: Any
    dout: Any
    steps: Any
    k: Any
    v: Any
    p: Any
    keys_full: Any
    q_full: Any
    dout_full: Any
    own_full: Any


@gluon.jit
def hopper_wide_dkv(
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
    key_ranges_ptr,
    key_extents_ptr,
    key_mask_BT,
    alibi_slopes_ptr,
    dropout_BH,
    bounds_ptr,
    intervals_ptr,
    query_tiles_ptr,
    dk_in_BTGD,
    dv_in_BTGE,
    dk_BTGD,
    dv_BTGE,
    scale,
    inner,
    softcap,
    threshold,
    rescale,
    S,
    T,
    together,
    H,
    G,
    D: gl.constexpr,
    E: gl.constexpr,
    K_STRIDE: gl.constexpr,
    V_STRIDE: gl.constexpr,
    V_COLUMN: gl.constexpr,
    Q_RUNS: gl.constexpr,
    K_RUNS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_D: gl.constexpr,
    TAIL_D: gl.constexpr,
    BLOCK_E: gl.constexpr,
    TAIL_E: gl.constexpr,
    FIRST: gl.constexpr,
    ZERO_MASKED: gl.constexpr,
    FULLY_MASKED: gl.constexpr,
    ALIGNED: gl.constexpr,
    STAGES: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    gl.static_assert(STAGES <= BACKWARD_STAGES and BLOCK_K == 64, "named barriers overlap, or a warpgroup has other keys")
    sizes: gl.constexpr = WideConstants(
        D, E, K_STRIDE, V_STRIDE, V_COLUMN, Q_RUNS, K_RUNS, BLOCK_Q, BLOCK_K, BLOCK_D, TAIL_D, BLOCK_E, TAIL_E,
        FIRST, ZERO_MASKED, FULLY_MASKED, ALIGNED, STAGES, STAGES, IN_REGISTERS,
    )  # fmt: skip
    args = BackwardArguments(
        rows_ptr, key_ranges_ptr, key_extents_ptr, bounds_ptr, intervals_ptr, query_tiles_ptr, key_mask_BT, key_mask_spans_ptr,
        alibi_slopes_ptr, dropout_BH, lse2_BHS, delta_BHS, dk_in_BTGD, dv_in_BTGE, None, dk_BTGD, dv_BTGE, scale, inner, softcap,
        threshold, rescale, S, T, H, G,
    )  # fmt: skip
    work = survey(args, keys_of_program(together, args, sizes), sizes)
    sources = Sources(
        Parts(q_BSHD, q_tail_BSHD), Parts(dout_BSHE, dout_tail_BSHE), Parts(k_BTGD, k_tail_BTGD), Parts(v_BTGE, v_tail_BTGE)
    )  # fmt: skip
    shared = WideSharedMemory(
        allocate_parts(sources.q, STAGES, BLOCK_Q, BLOCK_D, TAIL_D),
        allocate_parts(sources.dout, STAGES, BLOCK_Q, BLOCK_E, TAIL_E),
        allocate_steps(args, sizes),
        allocate_parts(sources.k, 1, BLOCK_K, BLOCK_D, TAIL_D),
        allocate_parts(sources.v, 1, BLOCK_K, BLOCK_E, TAIL_E),
        gl.allocate_shared_memory(gl.float32, [BLOCK_K, BLOCK_Q], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])),
        allocate_barriers(1),
        allocate_barriers(STAGES),
        allocate_barriers(STAGES),
        allocate_barriers(1),
    )
    mbarrier.init(shared.own_full.index(0), count=1)
    mbarrier.init(shared.keys_full.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.q_full.index(stage), count=1)
        mbarrier.init(shared.dout_full.index(stage), count=1)
    gl.warp_specialize(
        [
            (sum_values, (args, shared, work, sizes)),
            (sum_keys, (args, shared, work, sizes)),
            (producer, (sources, args, shared, work, sizes)),
            (scout, (args, shared, work, sizes)),
        ],
        [4, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def sum_values(args, shared, work, sizes: gl.constexpr):
    """Compute dv of the program's keys, and send p of each query tile to ``sum_keys`` through shared memory."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    S_LAYOUT: gl.constexpr = accumulator(BLOCK_Q)
    dv = zeros_of_parts(sizes.BLOCK_K, sizes.BLOCK_E, sizes.TAIL_E)
    if work.steps > 0:
        j = work.n0 + gl.arange(0, sizes.BLOCK_K, gl.SliceLayout(1, S_LAYOUT))
        seen = keys_seen_by_some(args, work, sizes, j)
        some_unseen = False
        if args.key_mask is not None:
            some_unseen = some_hidden(args.key_mask_spans, work.batch, args.T, work.k_run * work.k_slot + work.n0, sizes.BLOCK_K)
        mbarrier.wait(shared.keys_full.index(0), 0)
        k = clean(shared.k, args, work, sizes, sizes.TAIL_D)
        mbarrier.wait(shared.q_full.index(0), 0)
        s = wait_for_products(
            0, deps=[multiply_transposed(k, tile_of(shared.q, 0, sizes.TAIL_D), sizes.BLOCK_K, BLOCK_Q, sizes.TAIL_D)]
        )
        step = gl.to_tensor(0)
        for member in range(args.H // args.G):
            head = work.group * (args.H // args.G) + member
            for each in range(sizes.Q_RUNS):
                q_run = sizes.Q_RUNS - 1 - each
                run = run_of(args, work, sizes, q_run, head, j, seen)
                if args.query_tiles is not None:
                    for _ in range(gl.where(q_run == 0, work.visited[0], work.visited[1])):
                        m0 = read_number(shared.steps.first_query, step % STEPS)
                        whole = False
                        if args.key_extents is None:
                            whole = (m0 >= WHOLE) & (not some_unseen)
                        m0 &= MASKED_ROWS - 1
                        if whole:
                            step, s, dv = visit_queries(step, s, dv, k, m0, run, args, shared, work, sizes, False)
                        else:
                            step, s, dv = visit_queries(step, s, dv, k, m0, run, args, shared, work, sizes, True)
                else:
                    tiles = query_tiles(args.rows, q_run, work.k_run, work.k_tile, sizes)
                    whole_last = gl.where(some_unseen, tiles.whole_first, tiles.whole_last)
                    for part in range(2):  # from the last tile to the first: tiles with a mask, without a mask, with a mask
                        above = gl.where(part == 0, tiles.last, tiles.whole_first)
                        for t in range(above - gl.where(part == 0, whole_last, tiles.first)):
                            m0 = (above - 1 - t) * BLOCK_Q
                            step, s, dv = visit_queries(step, s, dv, k, m0, run, args, shared, work, sizes, True)
                        for t in range(gl.where(part == 0, whole_last - tiles.whole_first, 0)):
                            m0 = (whole_last - 1 - t) * BLOCK_Q
                            step, s, dv = visit_queries(step, s, dv, k, m0, run, args, shared, work, sizes, False)
    sync(P_READ, among_consumers(2), 4)  # k and v have been read; their memory now serves to store dk and dv
    dv_in = args.dk_in if args.dv_in is None else args.dv_in
    dv_to = args.dk if args.dv is None else args.dv
    factor = 1.0
    if args.dropout is not None:
        factor = args.rescale
    finish_parts(dv, factor, dv_in, dv_to, sizes.V_COLUMN, shared.v, sizes.V_STRIDE, sizes.E, args, work, sizes, sizes.TAIL_E)


@gluon.jit
def visit_queries(
    step, s, dv, k, m0, run, args, shared, work, sizes: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Add one query tile to dv and send its p to ``sum_keys``; return (next step, ``s`` = k q^T of the next tile, dv). The last
    call computes k q^T of its own tile again, and this product is not used."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    STAGES: gl.constexpr = sizes.STAGES
    S_LAYOUT: gl.constexpr = accumulator(BLOCK_Q)
    D_PARTS: gl.constexpr = 2 if sizes.TAIL_D > 0 else 1
    stage = step % STAGES
    number = step % STEPS
    lse2 = shared.steps.lse2.index(number).load(gl.SliceLayout(0, S_LAYOUT))
    factor = 1.0
    if args.softcap is None:
        s *= args.inner
    else:
        s = special_tanh(s * args.inner)
        factor = 1.0 - s * s
        s *= args.softcap
    s -= gl.expand_dims(lse2, 0)
    if args.alibi_slopes is not None:
        s += gl.expand_dims(run.bias, 1)
    p = gl.exp2(s)
    if MASKED:
        p = gl.where(visible(m0, run, shared, number, args, sizes), p, 0.0)
    if args.dropout is not None:
        keep = keep_mask_of_keys(
            run.stream, args.threshold, m0, work.n0, run.q_start, run.k_start, run.stride, sizes.BLOCK_K, BLOCK_Q, sizes.ALIGNED
        )
        p = gl.where(keep, p, -p)
    half = packed_half(p, shared.q.main.dtype, args.dropout is not None)
    if args.softcap is not None:
        p *= factor
    if step > 0:
        sync(P_READ, among_consumers(2), 4)
    shared.p.store(p)
    arrive(P_FULL, among_consumers(2), 4)
    release(Q_READ + stage, 2)
    mbarrier.wait(shared.dout_full.index(stage), step // STAGES & 1)
    dv, half = multiply_add(dv, half, tile_of(shared.dout, stage, sizes.TAIL_E), sizes.TAIL_E)
    following = gl.minimum(step + 1, work.steps - 1)
    mbarrier.wait(shared.q_full.index(following % STAGES), following // STAGES & 1)
    q = tile_of(shared.q, following % STAGES, sizes.TAIL_D)
    ahead = multiply_transposed(k, q, sizes.BLOCK_K, BLOCK_Q, sizes.TAIL_D)
    dv, half = wait_for_sum(D_PARTS, dv, half, sizes.TAIL_E)
    release(DOUT_READ + stage, 2)
    ahead = wait_for_products(0, deps=[ahead])
    return step + 1, ahead, dv


@gluon.jit
def sum_keys(args, shared, work, sizes: gl.constexpr):
    """Compute dk of the program's keys from the p that ``sum_values`` sends through shared memory."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    STAGES: gl.constexpr = sizes.STAGES
    S_LAYOUT: gl.constexpr = accumulator(BLOCK_Q)
    E_PARTS: gl.constexpr = 2 if sizes.TAIL_E > 0 else 1
    dk = zeros_of_parts(sizes.BLOCK_K, sizes.BLOCK_D, sizes.TAIL_D)
    if work.steps > 0:
        mbarrier.wait(shared.keys_full.index(0), 0)
        v = clean(shared.v, args, work, sizes, sizes.TAIL_E)
        mbarrier.wait(shared.dout_full.index(0), 0)
        dp = wait_for_products(
            0, deps=[multiply_transposed(v, tile_of(shared.dout, 0, sizes.TAIL_E), sizes.BLOCK_K, BLOCK_Q, sizes.TAIL_E)]
        )
        for step in range(work.steps):
            stage = step % STAGES
            delta = shared.steps.delta.index(step % STEPS).load(gl.SliceLayout(0, S_LAYOUT))
            sync(P_FULL, among_consumers(2), 4)
            p = shared.p.load(S_LAYOUT)
            if args.dropout is not None:
                dp = gl.where(p > 0.0, dp * args.rescale, 0.0)
                p = gl.abs(p)
            ds = packed_half(p * (dp - gl.expand_dims(delta, 0)), shared.q.main.dtype)
            mbarrier.wait(shared.q_full.index(stage), step // STAGES & 1)
            dk, ds = multiply_add(dk, ds, tile_of(shared.q, stage, sizes.TAIL_D), sizes.TAIL_D)
            if step < work.steps - 1:  # the product takes ds, so the loads of p and delta have ended
                arrive(P_READ, among_consumers(2), 4)
            release(DOUT_READ + stage, 2)
            following = gl.minimum(step + 1, work.steps - 1)
            mbarrier.wait(shared.dout_full.index(following % STAGES), following // STAGES & 1)
            dout = tile_of(shared.dout, following % STAGES, sizes.TAIL_E)
            ahead = multiply_transposed(v, dout, sizes.BLOCK_K, BLOCK_Q, sizes.TAIL_E)
            dk, ds = wait_for_sum(E_PARTS, dk, ds, sizes.TAIL_D)
            release(Q_READ + stage, 2)
            dp = wait_for_products(0, deps=[ahead])
    sync(P_READ, among_consumers(2), 4)
    finish_parts(dk, args.scale, args.dk_in, args.dk, 0, shared.k, sizes.K_STRIDE, sizes.D, args, work, sizes, sizes.TAIL_D)


@gluon.jit
def clean(tiles, args, work, sizes: gl.constexpr, TAIL: gl.constexpr):
    """Return a k or v tile as wgmma's left operand, in registers if IN_REGISTERS. If ZERO_MASKED, first apply ``hide_unseen``."""
    tile = tile_of(tiles, 0, TAIL)
    if sizes.ZERO_MASKED:
        hide_unseen(tile.main, args, work, sizes)
        if TAIL > 0:
            hide_unseen(tile.tail, args, work, sizes)
    if sizes.IN_REGISTERS:
        tile = in_registers(tile, accumulator(sizes.BLOCK_Q), TAIL)
    return tile


@gluon.jit
def finish_parts(
    x, factor, before, to, COLUMN: gl.constexpr, tiles, STRIDE: gl.constexpr, WIDTH: gl.constexpr,
    args, work, sizes: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Call ``finish`` for the main and the tail columns of the gradients ``factor * x``, with ``tiles`` as its shared memory."""
    tile = tile_of(tiles, 0, TAIL)
    MAIN: gl.constexpr = x.main.shape[1]
    finish(x.main * factor, before, to, COLUMN, tile.main, STRIDE, WIDTH, args, work, sizes)
    if TAIL > 0:
        finish(x.tail * factor, before, to, COLUMN + MAIN, tile.tail, STRIDE, WIDTH - MAIN, args, work, sizes)
