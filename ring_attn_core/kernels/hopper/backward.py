"""Backward attention of one rank's queries over one k/v shard, in Gluon for Hopper (sm_90a).

    s^T = k q^T     p^T = exp2(s^T - lse2)     dv += p^T dout     dp^T = v dout^T     ds^T = p^T (dp^T - delta)     dk += ds^T q
    dq += ds k

One pass over the key tiles computes the same as portable/backward_dq.py and portable/backward_dkv.py together, with 5 products
instead of 7. The products take p^T and ds^T from registers. ds also passes through shared memory, for dq; each warpgroup
computes one half of dq.

Shapes     as in the portable kernels, and dq_RX (see Sums); q, dout, k and v are read through TMA descriptors
Program    one per (tile of 128 keys, key head, batch row). It visits the queries that see these keys, in every query head of
           the key head. Two warpgroups of 64 keys each compute. These 8 warps are the first partition, because other partitions
           get shared-memory addresses as numbers, which take registers. The other partitions are three single warps: the scout
           and the producer load k, v, q, dout, lse2 and delta (backward_producer.py), the adder adds dq by TMA to float32 sums
Sums       dq_RX holds 8192 sums for each query tile, in the order of the accumulators' registers. After the sums of all tiles it
           holds one counter for each query tile, its turn: the number of key tiles that have added to the query tile's sums
           (backward_dq.py). ``hopper_dq`` computes dq from the sums, once per ring
Order      key tiles add to a query tile in ascending order: each waits until the turn equals the number of key tiles before it.
           So two runs give the same bits. Programs start in the same order, so none waits for a later program. All programs walk
           from the last queries to the first, so each follows the program that started before it. Only adder warps wait for turns
Extents    a query tile may skip key tiles, by its bounds (backward_sums.extent_bounds) or, with key extents, by its intervals
           (extent_lists.py). With extents the scout stores the visible keys of each query as an int32; every score is masked
ALiBi      the scout subtracts the queries' part of the bias from lse2; the keys' part is one number per key
Dropout    the sign of p holds the mask for dv and ds. With heads of 128, dropout makes the kernel 20 % slower. If bools held the
           mask, dropout would make it 30 % slower, because ptxas packs bools
Tiles      BLOCK_Q comes from ``queries`` of launches.py, the stages from ``backward`` there
Precision  products in the input dtype, sums in f32; p and ds are rounded once to the input dtype

README.md has the timeline and the failed attempts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ..portable.loads import some_hidden
from ..portable.rows import NOTHING_BEGINS, load_row
from ..portable.scores import LOG2E
from .backward_dkv import finish, hide_unseen, keys_seen_by_some
from .backward_dq import SUM_COLUMNS, SUM_ROWS, adder, hand_over, layout_of_dq
from .backward_producer import MASKED_ROWS, STEPS, Sources, allocate_steps, producer, scout
from .backward_scheduler import keys_of_program, queries_of_keys, query_tiles, survey
from .barriers import (
    BACKWARD_STAGES,
    DOUT_READ,
    DQ_FREE,
    DQ_FULL,
    Q_READ,
    allocate_barriers,
    arrive,
    read_number,
    release,
    sync,
    with_one_warp,
)
from .dropout import keep_mask_of_keys
from .gluon import wait_for_products
from .instructions import packed_half, special_tanh
from .parts import Parts, allocate_parts
from .register_layouts import accumulator, here, matrix


class BackwardConstants(NamedTuple):
    """The compile-time constants of ``hopper_backward``. STAGES: tiles of q in flight. OUT_STAGES: tiles of dout in flight."""

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


class BackwardArguments(NamedTuple):
    """The arguments of ``hopper_backward`` without its TMA descriptors; an array that the call does not have is None."""

    rows: Any
    key_ranges: Any
    key_extents: Any
    bounds: Any
    intervals: Any
    query_tiles: Any
    key_mask: Any
    key_mask_spans: Any
    alibi_slopes: Any
    dropout: Any
    lse2: Any
    delta: Any
    dk_in: Any
    dv_in: Any
    sums: Any
    dk: Any
    dv: Any
    scale: Any
    inner: Any
    softcap: Any
    threshold: Any
    rescale: Any
    S: Any
    T: Any
    H: Any
    G: Any


class BackwardSharedMemory(NamedTuple):
    """Shared memory: tiles, ``Steps`` and mbarriers. The producer waits for ``own_full``, consumers for the other ``*_full``."""

    q: Any
    dout: Any
    steps: Any
    k: Any
    v: Any
    ds: Any
    dq: Any
    keys_full: Any
    q_full: Any
    dout_full: Any
    own_full: Any


@gluon.jit
def hopper_backward(
    q_BSHD,
    dout_BSHE,
    k_BTGD,
    v_BTGE,
    dq_in_RX,
    lse2_BHS,
    delta_BHS,
    rows_ptr,
    key_ranges_ptr,
    key_extents_ptr,
    bounds_ptr,
    intervals_ptr,
    query_tiles_ptr,
    key_mask_BT,
    key_mask_spans_ptr,
    alibi_slopes_ptr,
    dropout_BH,
    dq_RX,
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
    ZERO_MASKED: gl.constexpr,
    FULLY_MASKED: gl.constexpr,
    ALIGNED: gl.constexpr,
    STAGES: gl.constexpr,
    OUT_STAGES: gl.constexpr,
):
    DTYPE: gl.constexpr = q_BSHD.dtype
    gl.static_assert(STAGES <= BACKWARD_STAGES and OUT_STAGES <= BACKWARD_STAGES, "named barriers overlap")
    sizes: gl.constexpr = BackwardConstants(
        D, E, K_STRIDE, V_STRIDE, V_COLUMN, Q_RUNS, K_RUNS, BLOCK_Q, BLOCK_K, BLOCK_D, 0, BLOCK_D, 0,
        True, ZERO_MASKED, FULLY_MASKED, ALIGNED, STAGES, OUT_STAGES,
    )  # fmt: skip
    args = BackwardArguments(
        rows_ptr, key_ranges_ptr, key_extents_ptr, bounds_ptr, intervals_ptr, query_tiles_ptr, key_mask_BT,
        key_mask_spans_ptr, alibi_slopes_ptr, dropout_BH, lse2_BHS, delta_BHS, None, None, dq_RX, dk_BTGD, dv_BTGE,
        scale, inner, softcap, threshold, rescale, S, T, H, G,
    )  # fmt: skip
    work = survey(args, keys_of_program(together, args, sizes), sizes)
    sources = Sources(Parts(q_BSHD, q_BSHD), Parts(dout_BSHE, dout_BSHE), Parts(k_BTGD, k_BTGD), Parts(v_BTGE, v_BTGE))
    shared = BackwardSharedMemory(
        allocate_parts(sources.q, STAGES, BLOCK_Q, BLOCK_D, 0),
        allocate_parts(sources.dout, OUT_STAGES, BLOCK_Q, BLOCK_D, 0),
        allocate_steps(args, sizes),
        allocate_parts(sources.k, 1, BLOCK_K, BLOCK_D, 0),
        allocate_parts(sources.v, 1, BLOCK_K, BLOCK_D, 0),
        gl.allocate_shared_memory(DTYPE, [2, BLOCK_K, BLOCK_Q], gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], DTYPE)),
        gl.allocate_shared_memory(gl.float32, [SUM_ROWS, SUM_COLUMNS], dq_in_RX.layout),
        allocate_barriers(1),
        allocate_barriers(STAGES),
        allocate_barriers(OUT_STAGES),
        allocate_barriers(1),
    )
    mbarrier.init(shared.own_full.index(0), count=1)
    mbarrier.init(shared.keys_full.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.q_full.index(stage), count=1)
    for stage in gl.static_range(OUT_STAGES):
        mbarrier.init(shared.dout_full.index(stage), count=1)
    gl.warp_specialize(
        [
            (consumer, (args, shared, work, sizes)),
            (producer, (sources, args, shared, work, sizes)),
            (scout, (args, shared, work, sizes)),
            (adder, (dq_in_RX, args, shared, work, sizes)),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )


@gluon.jit
def consumer(args, shared, work, sizes: gl.constexpr):
    """Compute dk and dv of the program's keys, and their contribution to dq of each query tile."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    BLOCK_K: gl.constexpr = sizes.BLOCK_K
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    S_LAYOUT: gl.constexpr = accumulator(BLOCK_Q, 8)
    O_LAYOUT: gl.constexpr = accumulator(BLOCK_D, 8)
    dk = gl.zeros([BLOCK_K, BLOCK_D], gl.float32, O_LAYOUT)
    dv = gl.zeros([BLOCK_K, BLOCK_D], gl.float32, O_LAYOUT)
    if work.steps > 0:
        j = work.n0 + gl.arange(0, BLOCK_K, gl.SliceLayout(1, S_LAYOUT))
        seen = keys_seen_by_some(args, work, sizes, j)
        some_unseen = False
        if args.key_mask is not None:
            k_base = work.k_run * work.k_slot
            some_unseen = some_hidden(args.key_mask_spans, work.batch, args.T, k_base + work.n0, BLOCK_K)
        mbarrier.wait(shared.keys_full.index(0), 0)
        if sizes.ZERO_MASKED:
            hide_unseen(matrix(shared.k.main.index(0)), args, work, sizes)
            hide_unseen(matrix(shared.v.main.index(0)), args, work, sizes)
        mbarrier.wait(shared.q_full.index(0), 0)
        s = wait_for_products(0, deps=[multiply_queries(shared, 0, sizes)])
        at = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
        for member in range(args.H // args.G):
            head = work.group * (args.H // args.G) + member
            for each in range(sizes.Q_RUNS):
                q_run = sizes.Q_RUNS - 1 - each
                run = run_of(args, work, sizes, q_run, head, j, seen)
                if args.query_tiles is not None:
                    for _ in range(gl.where(q_run == 0, work.visited[0], work.visited[1])):
                        m0 = read_number(shared.steps.first_query, at[2] % STEPS, 8) & (MASKED_ROWS - 1)
                        at, s, dk, dv = visit_queries(at, s, dk, dv, m0, run, args, shared, work, sizes, True)
                else:
                    tiles = query_tiles(args.rows, q_run, work.k_run, work.k_tile, sizes)
                    whole_last = gl.where(some_unseen, tiles.whole_first, tiles.whole_last)
                    for part in range(2):  # from the last tile to the first: tiles with a mask, without a mask, with a mask
                        above = gl.where(part == 0, tiles.last, tiles.whole_first)
                        for t in range(above - gl.where(part == 0, whole_last, tiles.first)):
                            m0 = (above - 1 - t) * BLOCK_Q
                            at, s, dk, dv = visit_queries(at, s, dk, dv, m0, run, args, shared, work, sizes, True)
                        for t in range(gl.where(part == 0, whole_last - tiles.whole_first, 0)):
                            m0 = (whole_last - 1 - t) * BLOCK_Q
                            at, s, dk, dv = visit_queries(at, s, dk, dv, m0, run, args, shared, work, sizes, False)
    if args.dropout is not None:
        dv *= args.rescale
    dv_to = args.dk if args.dv is None else args.dv
    finish(dk * args.scale, None, args.dk, 0, matrix(shared.k.main.index(0)), sizes.K_STRIDE, sizes.D, args, work, sizes)
    finish(dv, None, dv_to, sizes.V_COLUMN, matrix(shared.v.main.index(0)), sizes.V_STRIDE, sizes.E, args, work, sizes)


class RunOfQueries(NamedTuple):
    """A run of queries, with those that see each key. By the band these are ``begin .. begin + width``; with extents ``begin`` is
    the key's index in its tile. ``first_query``, ``queries``: the queries that may see a key by key extents. ``bias``: the keys'
    part of the ALiBi bias, in base 2. ``stream``: Philox key of the head."""

    begin: Any
    width: Any
    first_query: Any
    queries: Any
    q_len: Any
    q_start: Any
    k_start: Any
    stride: Any
    bias: Any
    stream: Any


@gluon.jit
def run_of(args, work, sizes: gl.constexpr, q_run, head, j, seen):
    """Return query run ``q_run`` for the keys ``j``; a key that is not ``seen`` gets an empty interval of queries."""
    row = load_row(args.rows, q_run * sizes.K_RUNS + work.k_run)
    if args.key_ranges is None:
        begin = gl.where(seen, j + row.lo, 2147483647)
    else:
        begin = gl.where(seen, j - work.n0, NOTHING_BEGINS)
    first, queries = 0, 0
    if args.key_extents is not None:
        first, end = queries_of_keys(j, args, work, row)
        queries = gl.where(seen, gl.maximum(end - first, 0), 0)
    bias = 0.0
    if args.alibi_slopes is not None:
        slope = gl.load(args.alibi_slopes + head).to(gl.float32) * LOG2E
        bias = slope * (row.stride * (j - work.n0)).to(gl.float32)
    stream = 0
    if args.dropout is not None:
        stream = gl.load(args.dropout + work.batch * args.H + head)
    return RunOfQueries(begin, row.hi - row.lo, first, queries, row.q_len, row.q_start, row.k_start, row.stride, bias, stream)


@gluon.jit
def visit_queries(
    at, s, dk, dv, m0, run, args, shared, work, sizes: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Add one query tile to dk and dv, and hand its dq to the adder warp. Return (``at`` and ``s`` of the next tile, dk, dv):
    ``at`` is (stage of q, phase, step), ``s`` is k q^T. No product stays in flight between calls, because ptxas serializes those
    that cross the edge of a loop."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    BLOCK_K: gl.constexpr = sizes.BLOCK_K
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    DTYPE: gl.constexpr = shared.q.main.dtype
    S_LAYOUT: gl.constexpr = accumulator(BLOCK_Q, 8)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator(BLOCK_D, 8), 2)
    STAGES: gl.constexpr = sizes.STAGES
    stage, phase, step = at
    out_stage, out_phase = stage, phase
    if sizes.OUT_STAGES == 2:
        out_stage, out_phase = step & 1, step >> 1 & 1
    dout = matrix(shared.dout.main.index(here(out_stage)))
    v = matrix(shared.v.main.index(here(0)))
    mbarrier.wait(shared.dout_full.index(out_stage), out_phase)
    zero = gl.zeros([BLOCK_K, BLOCK_Q], gl.float32, S_LAYOUT)
    pending = warpgroup_mma(v, dout.permute([1, 0]), zero, use_acc=False, is_async=True)
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
            run.stream, args.threshold, m0, work.n0, run.q_start, run.k_start, run.stride, BLOCK_K, BLOCK_Q, sizes.ALIGNED
        )
        p = gl.where(keep, p, -p)
    half = packed_half(p, DTYPE, args.dropout is not None)
    if args.softcap is not None:
        p *= factor
    half = gl.convert_layout(half, P_LAYOUT, assert_trivial=True)
    more = step < work.steps - 1  # the last tile computes its own scores again, which are not used
    around = more & (stage == STAGES - 1)
    following = gl.where(around, 0, stage + more.to(gl.int32))
    following_phase = phase ^ around.to(gl.int32)
    mbarrier.wait(shared.q_full.index(following), following_phase)
    dout = matrix(shared.dout.main.index(here(out_stage)))
    dv = warpgroup_mma(half, dout, dv, is_async=True)
    dp = wait_for_products(1, deps=[pending])
    delta = shared.steps.delta.index(number).load(gl.SliceLayout(0, S_LAYOUT))
    if args.dropout is not None:
        dp = gl.where(p > 0.0, dp * args.rescale, 0.0)
        p = gl.abs(p)
    ds = packed_half(p * (dp - gl.expand_dims(delta, 0)), DTYPE)
    tile = shared.ds.index(step & 1)
    tile.store(ds)
    ds = gl.convert_layout(ds, P_LAYOUT, assert_trivial=True)
    fence_async_shared()
    # Triton puts a barrier of all 8 warps here, because the product reads the stores of all of them.
    zero_dq = gl.zeros([BLOCK_Q, BLOCK_D], gl.float32, layout_of_dq(BLOCK_Q))
    tile = shared.ds.index(here(step & 1))
    k = matrix(shared.k.main.index(here(0)))
    dq = warpgroup_mma(tile.permute([1, 0]), k, zero_dq, use_acc=False, is_async=True)
    dv, half = wait_for_products(1, deps=[dv, half])
    release(DOUT_READ + out_stage, 2, 8)
    ahead = multiply_queries(shared, here(following), sizes)
    q = matrix(shared.q.main.index(here(stage)))
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dq = wait_for_products(2, deps=[dq])
    if step > 0:
        sync(DQ_FREE, with_one_warp(2), 8)
    hand_over(dq, shared.dq, BLOCK_Q)
    fence_async_shared()
    arrive(DQ_FULL, with_one_warp(2), 8)
    s, dk, ds = wait_for_products(0, deps=[ahead, dk, ds])
    release(Q_READ + stage, 2, 8)
    return (following, following_phase, step + 1), s, dk, dv


@gluon.jit
def visible(m0, run, shared, number, args, sizes: gl.constexpr):
    """Return the mask, bool [keys, queries], of the visible pairs of query tile ``number`` from ``m0`` on."""
    S_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_Q, gl.num_warps())
    i = m0 + gl.arange(0, sizes.BLOCK_Q, gl.SliceLayout(0, S_LAYOUT))
    i = gl.expand_dims(gl.where(i < run.q_len, i, NOTHING_BEGINS), 0)
    if args.key_extents is not None:
        seen = (i - gl.expand_dims(run.first_query, 1)).to(gl.uint32) < gl.expand_dims(run.queries, 1).to(gl.uint32)
    elif args.key_ranges is None:
        seen = (i - gl.expand_dims(run.begin, 1)).to(gl.uint32) <= run.width.to(gl.uint32)
    if args.key_ranges is not None:
        words = gl.expand_dims(shared.steps.seen.index(number).load(gl.SliceLayout(0, S_LAYOUT)), 0)
        by_query = (gl.expand_dims(run.begin, 1) - (words & 255)).to(gl.uint32) < (words >> 8).to(gl.uint32)
        if args.key_extents is None:
            seen = by_query
        else:
            seen &= by_query
    return seen


@gluon.jit
def multiply_queries(shared, stage, sizes: gl.constexpr):
    """Issue the asynchronous product k q^T [keys, queries], and return it in flight."""
    zero = gl.zeros([sizes.BLOCK_K, sizes.BLOCK_Q], gl.float32, accumulator(sizes.BLOCK_Q, 8))
    q = matrix(shared.q.main.index(stage))
    return warpgroup_mma(matrix(shared.k.main.index(here(0))), q.permute([1, 0]), zero, use_acc=False, is_async=True)
