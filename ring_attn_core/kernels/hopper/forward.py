"""Forward attention of one rank's queries over one k/v shard, in Gluon for Hopper (sm_90a).

portable/forward.py says what it computes, from what and to what: the arrays are the same and the results agree to a rounding.

Program    one a multiprocessor: one warp produces, 2 or 3 warpgroups consume, 64 queries each of a (q tile, head, batch row).
           Programs take tiles by a ticket, a count in memory: some heads at a time, which share their keys in the L2 cache, of
           these the heaviest tiles first. The beginning and end of a warpgroup's tile hide behind the products of the other
Producer   takes tickets, and has the next tile's q and first k brought while the consumers finish this one. TMA into rings of
           STAGES tiles, k of a step ahead of v of the step before; descriptors of [batch, tokens, heads, columns], so that no
           tile reaches into another batch row. What else a tile holds beyond its run is masked, or hidden. Beside the keys it
           leaves which of them a key mask hides
Consumers  the probabilities in registers, and mostly q (HopperConfig); S = q k^T of this tile and P v of the tile before are in
           flight together, and the softmax runs under P v (FlashAttention-3, arXiv:2407.08608, section 3.2)
Walk       of all runs of keys one after the other, the pipeline never drained between them
Epilogue   the state of the keys seen before is read under the last product

Prediction for 64 queries x 128 keys of dim 128: 2 x 1024 cycles of wgmma for the two warpgroups of an SM, 528 of exp2 a
warpgroup, 464 instructions a warp. So the tensor cores set the time where the softmax hides: 989 TFLOP/s at 1.83 GHz, of which
the power limit leaves some 790 (a matrix product of 8192^3). At dim 64 products and exp2 take the same time, 512 cycles.

Measured   TFLOP/s on one H200, bf16, 16,384 tokens, interleaved with the others in one process, medians of 5 rounds:
                                         this    FlashAttention-4    cuDNN
           16/16 heads of 128, causal    619     627                 552
           16/16 heads of 128, full      633     678                 601
           32/8  heads of 128, causal    635     619                 568
           32/32 heads of 64, causal     452     510                 429
           4 x 4,096 tokens, causal      555     558                 498
At dim 128 84 % of the cycles of a step are products, at the 1.62 GHz that 690 W allow. At dim 64 softmax does not hide.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# (it takes what is known when a kernel is compiled for the class constexpr, and jitted functions for plain ones)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..portable.rows import partly_seen
from .barriers import PLACE_READ, Q_FREE, VALUES_CLEAN, allocate_numbers, read_number, release
from .forward_epilogue import finish, seen_before
from .forward_producer import producer
from .forward_softmax import probabilities, row_sum, scores, softmax_step
from .gluon import meet
from .register_layouts import accumulator, column, matrix
from .scheduler import FIELDS, run_of, tile_at, told


class Sizes(NamedTuple):
    """What is known when the kernel is compiled."""

    H: Any
    G: Any
    E: Any
    V_COLUMN: Any
    Q_RUNS: Any
    K_RUNS: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    BLOCK_D: Any
    BLOCK_E: Any
    GROUPS: Any
    STAGES: Any
    Q_IN_REGISTERS: Any
    FIRST: Any
    LAST: Any
    FOLDED: Any
    CLEAN: Any
    ALIGNED: Any


class Given(NamedTuple):
    """The kernel's arguments but for its TMA descriptors; None for what there is not."""

    rows: Any
    extents: Any
    ceiling: Any
    hidden: Any
    sinks: Any
    slopes: Any
    streams: Any
    out_in: Any
    lse_in: Any
    out: Any
    lse: Any
    tickets: Any
    inner: Any
    cap: Any
    threshold: Any
    rescale: Any
    S: Any
    T: Any
    together: Any
    total: Any


class Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that say that they are full."""

    q: Any
    k: Any
    v: Any
    out: Any
    ceiling: Any
    some_hidden: Any
    place: Any
    q_full: Any
    k_full: Any
    v_full: Any
    place_full: Any


@gluon.jit
def hopper_forward(
    q_BSHD,
    k_BTGD,
    v_BTGE,
    rows_ptr,
    extents_ptr,
    ceiling_BT,
    hidden_ptr,
    sinks_ptr,
    slopes_ptr,
    streams_BH,
    out_in_BSHE,
    lse_in_BSH,
    tickets_in_ptr,
    out_BSHE,
    lse_BSH,
    tickets_ptr,
    inner,
    cap,
    threshold,
    rescale,
    S,
    T,
    together,
    total,
    H: gl.constexpr,
    G: gl.constexpr,
    E: gl.constexpr,
    V_COLUMN: gl.constexpr,
    Q_RUNS: gl.constexpr,
    K_RUNS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_E: gl.constexpr,
    STAGES: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    FOLDED: gl.constexpr,
    CLEAN: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    DTYPE: gl.constexpr = q_BSHD.dtype
    GROUPS: gl.constexpr = BLOCK_Q // 64
    gl.static_assert(2 * STAGES <= PLACE_READ and Q_FREE + GROUPS <= VALUES_CLEAN, "named barriers overlap")
    sizes: gl.constexpr = Sizes(
        H, G, E, V_COLUMN, Q_RUNS, K_RUNS, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_E, GROUPS, STAGES, Q_IN_REGISTERS,
        FIRST, LAST, FOLDED, CLEAN, ALIGNED,
    )  # fmt: skip
    given = Given(
        rows_ptr, extents_ptr, ceiling_BT, hidden_ptr, sinks_ptr, slopes_ptr, streams_BH, out_in_BSHE, lse_in_BSH,
        out_BSHE, lse_BSH, tickets_ptr, inner, cap, threshold, rescale, S, T, together, total,
    )  # fmt: skip
    q = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 64, 1, BLOCK_D], q_BSHD.layout)
    out = q
    if BLOCK_D <= 128:
        out = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 64, 1, BLOCK_D], q_BSHD.layout)
    ceiling, some_hidden = None, None
    if ceiling_BT is not None:
        ceiling = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        some_hidden = allocate_numbers(STAGES)
    shared = Shared(
        q,
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_K, 1, BLOCK_D], k_BTGD.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_K, 1, BLOCK_E], v_BTGE.layout),
        out,
        ceiling,
        some_hidden,
        allocate_numbers(FIELDS),
        gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(shared.place_full.index(0), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(shared.q_full.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(stage), count=1)
        mbarrier.init(shared.v_full.index(stage), count=1)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (given, shared, sizes, 0)),
                (consumer, (given, shared, sizes, 1)),
                (producer, (q_BSHD, k_BTGD, v_BTGE, given, shared, sizes)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (consumer, (given, shared, sizes, 0)),
                (consumer, (given, shared, sizes, 1)),
                (consumer, (given, shared, sizes, 2)),
                (producer, (q_BSHD, k_BTGD, v_BTGE, given, shared, sizes)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


# --- the consumers ----------------------------------------------------------------------------------------------------


@gluon.jit
def consumer(given, shared, sizes: gl.constexpr, GROUP: gl.constexpr):
    """out and lse of 64 queries of every tile that the producer takes."""
    taken = gl.to_tensor(0)
    loads = gl.to_tensor(0)
    step = gl.to_tensor(0)
    place = told(taken, shared)
    while place.tiles >= 0:
        if place.tiles > 0:
            step = attend(step, loads, shared, given, place, sizes, GROUP)
            loads += 1
        else:
            leave(shared, given, place, sizes, GROUP)
            if sizes.BLOCK_D > 128:  # out passed through the memory of q
                fence_async_shared()
            release(PLACE_READ, sizes.GROUPS)
        taken += 1
        place = told(taken, shared)
    release(PLACE_READ, sizes.GROUPS)


@gluon.jit
def attend(step, loads, shared, given, place, sizes: gl.constexpr, GROUP: gl.constexpr):
    """out and lse of 64 queries; the first step that is not theirs."""
    STAGES: gl.constexpr = sizes.STAGES
    S_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_K)
    i = place.m0 + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([64, sizes.BLOCK_E], gl.float32, accumulator(sizes.BLOCK_E))
    end = step + place.tiles
    run = run_of(given, place, sizes, place.first_run, i)
    key = tile_at(0, run.first, run.last, run.whole_first, run.whole_last) * sizes.BLOCK_K
    mbarrier.wait(shared.q_full.index(GROUP), loads & 1)
    q = matrix(shared.q.index(GROUP))
    if sizes.Q_IN_REGISTERS:
        q = q.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    wait_for_keys(shared, step, end, STAGES)
    products = multiply_keys(q, shared, step % STAGES, sizes)
    s = scores_under_ceiling(products, q, 0, step % STAGES, shared, given, sizes)
    release(step % STAGES, sizes.GROUPS)
    # Only now: bar.arrive does not wait for loads in flight, but what uses them does.
    release(PLACE_READ, sizes.GROUPS)
    if sizes.Q_IN_REGISTERS:
        release(Q_FREE + GROUP, 1)
    weights, m, _ = softmax_step(s, m, run, key, i, given, place, sizes, True)
    l = row_sum(weights)
    wait_for_keys(shared, step + 1, end, STAGES)
    p = probabilities(weights, step, run, key, i, shared, given, place, sizes, True, GROUP)
    step += 1
    for number in gl.static_range(sizes.K_RUNS):  # unrolled: round a loop of runs ptxas would copy p at every step
        done = 1
        if sizes.K_RUNS > 1:
            run = run_of(given, place, sizes, number, i)
            done = gl.where(number == place.first_run, 1, 0)
        step, acc, p, m, l = walk(step, end, acc, p, m, l, q, run, done, i, shared, given, place, sizes, GROUP)
    if sizes.BLOCK_D <= 128 and not sizes.Q_IN_REGISTERS:
        release(Q_FREE + GROUP, 1)
    acc = multiply_values(acc, p, shared, end - 1, sizes)
    seen = seen_before(i, given, place, sizes, GROUP)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    release(STAGES + (end - 1) % STAGES, sizes.GROUPS)
    finish(acc, m, l, i, seen, shared, given, place, sizes, GROUP)
    if sizes.BLOCK_D > 128:  # out passed through the memory of q
        fence_async_shared()
        release(Q_FREE + GROUP, 1)
    return end


@gluon.jit
def leave(shared, given, place, sizes: gl.constexpr, GROUP: gl.constexpr):
    """out and lse of 64 queries that see no key of this shard."""
    S_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_K)
    if sizes.FIRST or sizes.LAST:
        i = place.m0 + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        acc = gl.zeros([64, sizes.BLOCK_E], gl.float32, accumulator(sizes.BLOCK_E))
        finish(acc, m, l, i, seen_before(i, given, place, sizes, GROUP), shared, given, place, sizes, GROUP)


@gluon.jit
def walk(step, end, acc, p, m, l, q, run, done, i, shared, given, place, sizes: gl.constexpr, GROUP: gl.constexpr):
    """The tiles of a run behind the first ``done``: those that need a mask, then the whole ones."""
    masked = run.last - run.first - (run.whole_last - run.whole_first)
    for t in range(done, masked):
        key = partly_seen(t, run.first, run.whole_first, run.whole_last) * sizes.BLOCK_K
        step, acc, p, m, l = visit(step, end, acc, p, m, l, q, run, key, i, shared, given, place, sizes, True, GROUP)
    for t in range(gl.maximum(done - masked, 0), run.whole_last - run.whole_first):
        key = (run.whole_last - 1 - t) * sizes.BLOCK_K
        step, acc, p, m, l = visit(step, end, acc, p, m, l, q, run, key, i, shared, given, place, sizes, False, GROUP)
    return step, acc, p, m, l


@gluon.jit
def visit(
    step, end, acc, p, m, l, q, run, key, i, shared, given, place, sizes: gl.constexpr,
    MASKED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One tile: its softmax runs while the tensor cores multiply the probabilities ``p`` of the tile before with their values.

    Nothing stays in flight at the end: over the edge of a loop, ptxas would have every product wait for the one before.
    """
    STAGES: gl.constexpr = sizes.STAGES
    stage = step % STAGES
    products = multiply_keys(q, shared, stage, sizes)
    acc = multiply_values(acc, p, shared, step - 1, sizes)
    s = scores_under_ceiling(products, q, 1, stage, shared, given, sizes)
    release(stage, sizes.GROUPS)
    if given.ceiling is not None:  # waited for before; it ends a basic block, or ptxas lets go of the keys behind the softmax
        mbarrier.wait(shared.v_full.index((step - 1) % STAGES), (step - 1) // STAGES & 1)
    weights, m, decay = softmax_step(s, m, run, key, i, given, place, sizes, MASKED)
    l = l * decay + row_sum(weights)
    # The spin loop of this wait ends a basic block: without it ptxas moves the exponentials behind the next wait.
    wait_for_keys(shared, step + 1, end, STAGES)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    release(STAGES + (step - 1) % STAGES, sizes.GROUPS)
    p = probabilities(weights, step, run, key, i, shared, given, place, sizes, MASKED, GROUP)
    return step + 1, acc * column(decay, accumulator(sizes.BLOCK_E)), p, m, l


@gluon.jit
def multiply_keys(q, shared, stage, sizes: gl.constexpr):
    """q k^T [64, keys], in flight."""
    zero = gl.zeros([64, sizes.BLOCK_K], gl.float32, accumulator(sizes.BLOCK_K))
    k = matrix(shared.k.index(stage))
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def multiply_values(acc, p, shared, step, sizes: gl.constexpr):
    """acc + p v of a step, in flight, once the values are there."""
    stage = step % sizes.STAGES
    meet()
    mbarrier.wait(shared.v_full.index(stage), step // sizes.STAGES & 1)
    return warpgroup_mma(p, matrix(shared.v.index(stage)), acc, is_async=True)


@gluon.jit
def scores_under_ceiling(products, q, LATER: gl.constexpr, stage, shared, given, sizes: gl.constexpr):
    """The scores of products, -inf for keys that the key mask hides, when at most LATER issued after them are in flight.

    q stays in its registers till then.
    """
    some_hidden = False
    if given.ceiling is not None:
        some_hidden = read_number(shared.some_hidden, stage) != 0
    if sizes.Q_IN_REGISTERS:
        products, q = warpgroup_mma_wait(LATER, deps=[products, q])
    else:
        products = warpgroup_mma_wait(LATER, deps=[products])
    s = scores(products, given, sizes)
    if given.ceiling is not None:  # noqa: SIM102 (known when compiled)
        if some_hidden:
            ceiling = shared.ceiling.index(stage).load(gl.SliceLayout(0, accumulator(sizes.BLOCK_K)))
            s = gl.minimum(s, gl.expand_dims(ceiling, 0))
    return s


@gluon.jit
def wait_for_keys(shared, step, end, STAGES: gl.constexpr):
    """Until the keys of a step are there, where there is such a step."""
    if step < end:
        mbarrier.wait(shared.k_full.index(step % STAGES), step // STAGES & 1)
