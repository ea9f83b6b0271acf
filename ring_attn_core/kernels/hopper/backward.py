"""Backward attention of one rank's queries over one k/v shard, in Gluon for Hopper (sm_90a): one pass over tiles of keys.

portable/backward_dq.py and portable/backward_dkv.py say what it computes. Here a program takes a tile of 128 keys of a key head
and walks over the queries that see it, of every query head of the group, with 5 products where the portable kernels make 7: two
warpgroups, 64 keys each,

    s^T = k q^T     p^T = exp2(s^T - lse2)     dv += p^T dout     dp^T = v dout^T     ds^T = p^T (dp^T - delta)     dk += ds^T q

with p^T and ds^T going from registers into the products; ds passes through shared memory once, for dq = ds k, of which each
warpgroup makes a half. They are one partition of 8 warps, and the first one, for to the others addresses in shared memory come as
numbers, which take registers. A warp has TMA bring q and dout; another has it add dq to float32 sums in memory.

Sums       dq_RX, of every tile of queries 8192 in the order of the accumulators' registers; behind all of them a word for each
           tile, the number of the k tile whose turn it is. ``hopper_dq`` makes dq of them, once per ring
Order      tiles of keys add to a tile of queries in their own order: each waits for its turn, so two runs give the same bits. No
           program waits for one that starts later, since programs start in that order too; all of them walk from the last queries
           to the first, so each follows the one before, and only the adding warps ever wait
Extents    every tile of queries may pass over some tiles of keys, by its bounds (backward_sums.extent_bounds). The producer
           brings what each query sees of the keys in a word, beside the number of the tile, and every score is masked
ALiBi      is taken off lse2 for the queries by the producer; the rest of it is a number a key
Dropout    the sign of p says what is kept, for dv and for ds: booleans are packed by ptxas, +30 %, not +20
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ..portable.loads import some_hidden
from ..portable.rows import load_row
from ..portable.scores import LOG2E
from .backward_dkv import finish, hide_unseen, keys_seen_by_some
from .backward_dq import adder, hand_over, layout_of_dq
from .backward_producer import producer
from .backward_scheduler import BLOCK_K, Place, query_tiles, survey
from .barriers import DQ_FREE, DQ_FULL, TO_ADDER, WITH_ADDER, allocate_numbers, barrier, read_number, release
from .dropout import kept_of_keys
from .gluon import wait_for_products
from .instructions import packed_half, special_tanh
from .register_layouts import accumulator, here, matrix

NEVER = gl.constexpr(2**30)


class Sizes(NamedTuple):
    """What is known when the kernel is compiled."""

    H: Any
    G: Any
    D: Any
    E: Any
    K_STRIDE: Any
    V_STRIDE: Any
    V_COLUMN: Any
    Q_RUNS: Any
    K_RUNS: Any
    BLOCK_Q: Any
    BLOCK_D: Any
    FIRST: Any
    CLEAN: Any
    ALIGNED: Any
    STAGES: Any
    OUT_STAGES: Any


class Given(NamedTuple):
    """The kernel's arguments but for its TMA descriptors; None for what there is not."""

    rows: Any
    extents: Any
    bounds: Any
    ceiling: Any
    hidden: Any
    slopes: Any
    streams: Any
    lse2: Any
    delta: Any
    dk_in: Any
    dv_in: Any
    sums: Any
    dk: Any
    dv: Any
    scale: Any
    inner: Any
    cap: Any
    threshold: Any
    rescale: Any
    S: Any
    T: Any


class Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that say that they are full."""

    q: Any
    dout: Any
    lse2: Any
    delta: Any
    seen: Any
    query: Any
    k: Any
    v: Any
    ds: Any
    dq: Any
    keys_full: Any
    q_full: Any
    dout_full: Any


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
    extents_ptr,
    bounds_ptr,
    ceiling_BT,
    hidden_ptr,
    slopes_ptr,
    streams_BH,
    dk_in_BTGD,
    dv_in_BTGE,
    dq_RX,
    dk_BTGD,
    dv_BTGE,
    scale,
    inner,
    cap,
    threshold,
    rescale,
    S,
    T,
    together,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    E: gl.constexpr,
    K_STRIDE: gl.constexpr,
    V_STRIDE: gl.constexpr,
    V_COLUMN: gl.constexpr,
    Q_RUNS: gl.constexpr,
    K_RUNS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_D: gl.constexpr,
    FIRST: gl.constexpr,
    CLEAN: gl.constexpr,
    ALIGNED: gl.constexpr,
    STAGES: gl.constexpr,
    OUT_STAGES: gl.constexpr,
):
    DTYPE: gl.constexpr = q_BSHD.dtype
    sizes: gl.constexpr = Sizes(
        H, G, D, E, K_STRIDE, V_STRIDE, V_COLUMN, Q_RUNS, K_RUNS, BLOCK_Q, BLOCK_D, FIRST, CLEAN, ALIGNED, STAGES, OUT_STAGES
    )
    given = Given(
        rows_ptr, extents_ptr, bounds_ptr, ceiling_BT, hidden_ptr, slopes_ptr, streams_BH, lse2_BHS, delta_BHS,
        dk_in_BTGD, dv_in_BTGE, dq_RX, dk_BTGD, dv_BTGE, scale, inner, cap, threshold, rescale, S, T,
    )  # fmt: skip
    slot = T // K_RUNS
    tiles = gl.cdiv(slot, BLOCK_K)
    # `together` heads of keys at a time, of each the tiles in their order.
    before = gl.program_id(0) // (together * K_RUNS * tiles) * together
    heads = gl.minimum(together, gl.num_programs(0) // (K_RUNS * tiles) - before)
    place_in_heads = gl.program_id(0) - before * K_RUNS * tiles
    tile = place_in_heads // heads
    head = before + place_in_heads % heads
    k_run = tile // tiles
    k_tile = tile % tiles
    place = Place(head // G, head % G, k_run, k_tile, k_tile * BLOCK_K, slot, S // Q_RUNS, 0, (0, 0), (0, 0), (0, 0))
    place = survey(given, place, sizes)
    words, query = None, None
    if extents_ptr is not None:
        query = allocate_numbers(STAGES)
        words = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared = Shared(
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_Q, 1, BLOCK_D], q_BSHD.layout),
        gl.allocate_shared_memory(DTYPE, [OUT_STAGES, 1, BLOCK_Q, 1, BLOCK_D], dout_BSHE.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.float32, [OUT_STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        words,
        query,
        gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_K, 1, BLOCK_D], k_BTGD.layout),
        gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_K, 1, BLOCK_D], v_BTGE.layout),
        gl.allocate_shared_memory(DTYPE, [2, BLOCK_K, BLOCK_Q], gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], DTYPE)),
        gl.allocate_shared_memory(gl.float32, [32, 256], dq_in_RX.layout),
        gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [OUT_STAGES, 1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(shared.keys_full.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.q_full.index(stage), count=1)
    for stage in gl.static_range(OUT_STAGES):
        mbarrier.init(shared.dout_full.index(stage), count=1)
    gl.warp_specialize(
        [
            (consumer, (given, shared, place, sizes)),
            (producer, (q_BSHD, dout_BSHE, k_BTGD, v_BTGE, given, shared, place, sizes)),
            (adder, (dq_in_RX, given, shared, place, sizes)),
        ],
        [1, 1],
        [24, 24],
    )


# --- the warpgroups that multiply -------------------------------------------------------------------------------------


@gluon.jit
def consumer(given, shared, place, sizes: gl.constexpr):
    """dk and dv of the keys, and dq of the queries."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    S_LAYOUT: gl.constexpr = accumulator(BLOCK_Q, 8)
    O_LAYOUT: gl.constexpr = accumulator(BLOCK_D, 8)
    dk = gl.zeros([BLOCK_K, BLOCK_D], gl.float32, O_LAYOUT)
    dv = gl.zeros([BLOCK_K, BLOCK_D], gl.float32, O_LAYOUT)
    if place.steps > 0:
        j = place.n0 + gl.arange(0, BLOCK_K, gl.SliceLayout(1, S_LAYOUT))
        seen = keys_seen_by_some(given, place, sizes, j)
        some_unseen = False
        if given.ceiling is not None:
            k_base = place.k_run * place.slot
            some_unseen = some_hidden(given.hidden, place.batch, given.T, k_base + place.n0, BLOCK_K, 16)
        mbarrier.wait(shared.keys_full.index(0), 0)
        if sizes.CLEAN:
            hide_unseen(given, shared, place, sizes)
        mbarrier.wait(shared.q_full.index(0), 0)
        s = wait_for_products(0, deps=[multiply_queries(shared, 0, sizes)])
        at = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
        for member in range(sizes.H // sizes.G):
            head = place.group * (sizes.H // sizes.G) + member
            for each in range(sizes.Q_RUNS):
                q_run = sizes.Q_RUNS - 1 - each
                run = run_of(given, place, sizes, q_run, head, j, seen)
                if given.extents is not None:
                    for _ in range(gl.where(q_run == 0, place.visited[0], place.visited[1])):
                        query = read_number(shared.query, at[0], 8)
                        at, s, dk, dv = visit(at, s, dk, dv, query, run, given, shared, place, sizes, True)
                else:
                    first, last, whole_first, whole_last = query_tiles(given.rows, q_run, place.k_run, place.k_tile, sizes)
                    whole_last = gl.where(some_unseen, whole_first, whole_last)
                    for part in range(2):  # from the last queries to the first: partly seen, whole, and partly seen again
                        above = gl.where(part == 0, last, whole_first)
                        for t in range(above - gl.where(part == 0, whole_last, first)):
                            query = (above - 1 - t) * BLOCK_Q
                            at, s, dk, dv = visit(at, s, dk, dv, query, run, given, shared, place, sizes, True)
                        for t in range(gl.where(part == 0, whole_last - whole_first, 0)):
                            query = (whole_last - 1 - t) * BLOCK_Q
                            at, s, dk, dv = visit(at, s, dk, dv, query, run, given, shared, place, sizes, False)
    if given.streams is not None:
        dv *= given.rescale
    dv_in = given.dk_in if given.dv_in is None else given.dv_in
    dv_to = given.dk if given.dv is None else given.dv
    finish(dk * given.scale, given.dk_in, given.dk, 0, shared.k.index(0), sizes.K_STRIDE, sizes.D, given, place, sizes)
    finish(dv, dv_in, dv_to, sizes.V_COLUMN, shared.v.index(0), sizes.V_STRIDE, sizes.E, given, place, sizes)


class Run(NamedTuple):
    """A run of queries as the keys see it: the first query that sees a key, ``width`` after it; with extents the key's number
    in the tile. ``bias``: what ALiBi adds for the keys. ``stream``: what dropout draws by."""

    begin: Any
    width: Any
    q_len: Any
    q_start: Any
    k_start: Any
    stride: Any
    bias: Any
    stream: Any


@gluon.jit
def run_of(given, place, sizes: gl.constexpr, q_run, head, j, seen):
    """The run of queries of a head."""
    lo, hi, _, q_len, q_start, _, _, k_start, stride = load_row(given.rows, q_run * sizes.K_RUNS + place.k_run)
    if given.extents is None:
        begin = gl.where(seen, j + lo, 2147483647)
    else:
        begin = gl.where(seen, j - place.n0, NEVER)
    bias = 0.0
    if given.slopes is not None:
        slope = gl.load(given.slopes + head).to(gl.float32) * LOG2E
        bias = slope * (stride * (j - place.n0)).to(gl.float32)
    stream = 0
    if given.streams is not None:
        stream = gl.load(given.streams + place.batch * sizes.H + head)
    return Run(begin, hi - lo, q_len, q_start, k_start, stride, bias, stream)


@gluon.jit
def visit(
    at, s, dk, dv, query, run, given, shared, place, sizes: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """One tile of queries. ``s``: k q^T of it; those of the next tile run beside the sums of this one.

    Nothing stays in flight at the end: over the edge of a loop, ptxas would have every product wait for the one before.
    """
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    DTYPE: gl.constexpr = shared.q.dtype
    S_LAYOUT: gl.constexpr = accumulator(BLOCK_Q, 8)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator(BLOCK_D, 8), 2)
    STAGES: gl.constexpr = sizes.STAGES
    stage, phase, step = at
    out_stage, out_phase = stage, phase
    if sizes.OUT_STAGES == 2:
        out_stage, out_phase = step & 1, step >> 1 & 1
    dout = matrix(shared.dout.index(here(out_stage)))
    v = matrix(shared.v.index(here(0)))
    mbarrier.wait(shared.dout_full.index(out_stage), out_phase)
    zero = gl.zeros([BLOCK_K, BLOCK_Q], gl.float32, S_LAYOUT)
    of_values = warpgroup_mma(v, dout.permute([1, 0]), zero, use_acc=False, is_async=True)
    lse2 = shared.lse2.index(stage).load(gl.SliceLayout(0, S_LAYOUT))
    factor = 1.0
    if given.cap is None:
        s *= given.inner
    else:
        s = special_tanh(s * given.inner)
        factor = 1.0 - s * s
        s *= given.cap
    s -= gl.expand_dims(lse2, 0)
    if given.slopes is not None:
        s += gl.expand_dims(run.bias, 1)
    p = gl.exp2(s)
    if MASKED:
        p = gl.where(visible(query, run, shared, stage, given, sizes), p, 0.0)
    if given.streams is not None:
        keep = kept_of_keys(
            run.stream, given.threshold, query, place.n0, run.q_start, run.k_start, run.stride, BLOCK_Q, sizes.ALIGNED
        )
        p = gl.where(keep, p, -p)
    half = packed_half(p, DTYPE, given.streams is not None)
    if given.cap is not None:
        p *= factor
    half = gl.convert_layout(half, P_LAYOUT, assert_trivial=True)
    more = step < place.steps - 1  # behind the last tile its scores are made again, for nothing
    around = more & (stage == STAGES - 1)
    following = gl.where(around, 0, stage + more.to(gl.int32))
    following_phase = phase ^ around.to(gl.int32)
    mbarrier.wait(shared.q_full.index(following), following_phase)
    dout = matrix(shared.dout.index(here(out_stage)))
    dv = warpgroup_mma(half, dout, dv, is_async=True)
    dp = wait_for_products(1, deps=[of_values])
    delta = shared.delta.index(out_stage).load(gl.SliceLayout(0, S_LAYOUT))
    if given.streams is not None:
        dp = gl.where(p > 0.0, dp * given.rescale, 0.0)
        p = gl.abs(p)
    ds = packed_half(p * (dp - gl.expand_dims(delta, 0)), DTYPE)
    tile = shared.ds.index(step & 1)
    tile.store(ds)
    ds = gl.convert_layout(ds, P_LAYOUT, assert_trivial=True)
    fence_async_shared()
    # Here Triton has all 8 warps meet: the product reads what all of them have stored.
    zero_dq = gl.zeros([BLOCK_Q, BLOCK_D], gl.float32, layout_of_dq(BLOCK_Q))
    tile = shared.ds.index(here(step & 1))
    k = matrix(shared.k.index(here(0)))
    dq = warpgroup_mma(tile.permute([1, 0]), k, zero_dq, use_acc=False, is_async=True)
    dv, half = wait_for_products(1, deps=[dv, half])
    release(STAGES + out_stage, 2, 8)
    ahead = multiply_queries(shared, here(following), sizes)
    q = matrix(shared.q.index(here(stage)))
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dq = wait_for_products(2, deps=[dq])
    if step > 0:
        barrier(WITH_ADDER, DQ_FREE, 8)
    hand_over(dq, shared.dq, BLOCK_Q)
    fence_async_shared()
    barrier(TO_ADDER, DQ_FULL, 8)
    s, dk, ds = wait_for_products(0, deps=[ahead, dk, ds])
    release(stage, 2, 8)
    return (following, following_phase, step + 1), s, dk, dv


@gluon.jit
def visible(query, run, shared, stage, given, sizes: gl.constexpr):
    """bool [keys, queries]: which keys a query sees."""
    S_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_Q, 8)
    if given.extents is None:
        i = query + gl.arange(0, sizes.BLOCK_Q, gl.SliceLayout(0, S_LAYOUT))
        i = gl.expand_dims(gl.where(i < run.q_len, i, NEVER), 0)
        seen = (i - gl.expand_dims(run.begin, 1)).to(gl.uint32) <= run.width.to(gl.uint32)
    else:
        words = gl.expand_dims(shared.seen.index(stage).load(gl.SliceLayout(0, S_LAYOUT)), 0)
        seen = (gl.expand_dims(run.begin, 1) - (words & 255)).to(gl.uint32) < (words >> 8).to(gl.uint32)
    return seen


@gluon.jit
def multiply_queries(shared, stage, sizes: gl.constexpr):
    """k q^T [keys, queries], in flight."""
    zero = gl.zeros([BLOCK_K, sizes.BLOCK_Q], gl.float32, accumulator(sizes.BLOCK_Q, 8))
    q = matrix(shared.q.index(stage))
    return warpgroup_mma(matrix(shared.k.index(here(0))), q.permute([1, 0]), zero, use_acc=False, is_async=True)
