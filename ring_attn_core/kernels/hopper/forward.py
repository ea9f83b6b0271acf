"""Forward attention of one rank's queries over one k/v shard, in Gluon for Hopper (sm_90a).

    s_ij, lse_i, out_i           as in portable/forward.py: the arrays are the same, and the results agree up to rounding

Shapes     as in portable/forward.py. q, k and v are read through TMA descriptors of [batch, tokens, heads, columns], so that no
           tile reaches into another batch row. The columns of q and k are in one part or two (parts.py)
Program    at most 132 persistent programs (one per multiprocessor of an H200). Each has a producer warp, and 2 or 3 consumer
           warpgroups that compute 64 queries each of one (q tile, head, batch row). For each q tile a program draws a ticket
           from a counter in memory. Successive tickets cover a few heads at a time, whose keys then stay in the L2 cache. Of
           these heads the last q tiles come first, or with extents the q tiles with the most key tiles (scheduler.py). The
           prologue and epilogue of one warpgroup overlap with the products of the others
Producer   takes tickets, and loads the next tile's q and first k while the consumers finish this tile. It fills ring buffers of
           STAGES tiles, the k of each step (one key tile) before the v of the previous step (forward_producer.py)
Consumers  keep the probabilities in registers, and q too if ``HopperConfig.q_in_registers``. S = q k^T of this tile and P v of
           the previous tile are in flight together. The softmax overlaps with P v (FlashAttention-3, arXiv:2407.08608, sec. 3.2)
K tiles    the runs of keys are visited one after the other, and the pipeline never drains between runs. If a tile extends beyond
           the end of its run, the keys there are masked or zeroed
State      as in portable/forward.py. The (out, lse) of earlier shards are read during the last product (forward_epilogue.py)
Tiles      BLOCK_Q, BLOCK_K, STAGES and registers come from tile_sizes.hopper_tiles
Precision  as in portable/forward.py, except softcap: its tanh has a relative error of at most 1.2e-5

README.md has the timeline, the predictions, the measurements and the failed attempts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..portable.rows import count_partly_seen, partly_seen
from .barriers import (
    FORWARD_STAGES,
    K_FREE,
    Q_FREE,
    V_FREE,
    VALUES_CLEAN,
    WORK_READ,
    allocate_barriers,
    allocate_numbers,
    read_number,
    release,
)
from .forward_epilogue import finish, seen_before
from .forward_producer import producer
from .forward_softmax import probabilities, row_sum, scores, softmax_step
from .gluon import meet
from .parts import Parts, allocate_parts, in_registers, multiply_transposed, tile_of
from .register_layouts import accumulator, column, matrix
from .scheduler import NUMBERS, await_tile, run_of, tile_at


class ForwardConstants(NamedTuple):
    """The compile-time constants of ``hopper_forward``. GROUPS: consumer warpgroups. STAGES: tiles of k, and of v, in flight."""

    E: Any
    V_COLUMN: Any
    Q_RUNS: Any
    K_RUNS: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    BLOCK_D: Any
    TAIL_D: Any
    BLOCK_E: Any
    GROUPS: Any
    STAGES: Any
    Q_IN_REGISTERS: Any
    FIRST: Any
    LAST: Any
    FOLDED: Any
    ZERO_MASKED: Any
    ALIGNED: Any


class ForwardArguments(NamedTuple):
    """The arguments of ``hopper_forward`` without TMA descriptors, None if absent. ``tickets``: counter of tickets taken.
    ``total``: number of q tiles. ``together``: heads that tickets cover at a time."""

    rows: Any
    extents: Any
    key_extents: Any
    key_tiles: Any
    intervals: Any
    tile_order: Any
    not_finite: Any
    key_mask: Any
    key_mask_spans: Any
    sinks: Any
    alibi_slopes: Any
    dropout: Any
    out_in: Any
    lse_in: Any
    out: Any
    lse: Any
    tickets: Any
    inner: Any
    softcap: Any
    threshold: Any
    rescale: Any
    S: Any
    T: Any
    H: Any
    G: Any
    together: Any
    total: Any


class ForwardSharedMemory(NamedTuple):
    """Shared memory: tiles (``q`` to ``out``), small arrays (``key_mask`` to ``work``) and mbarriers (``*_full``)."""

    q: Any
    k: Any
    v: Any
    out: Any
    key_mask: Any
    some_hidden: Any
    not_finite: Any
    first_key: Any
    extents: Any
    work: Any
    q_full: Any
    k_full: Any
    v_full: Any
    work_full: Any


@gluon.jit
def hopper_forward(
    q_BSHD,
    q_tail_BSHD,
    k_BTGD,
    k_tail_BTGD,
    v_BTGE,
    rows_ptr,
    extents_ptr,
    key_extents_ptr,
    key_mask_BT,
    key_mask_spans_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    dropout_BH,
    out_in_BSHE,
    lse_in_BSH,
    key_tiles_ptr,
    intervals_ptr,
    tile_order_ptr,
    not_finite_ptr,
    tickets_in_ptr,
    out_BSHE,
    lse_BSH,
    tickets_ptr,
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
    E: gl.constexpr,
    V_COLUMN: gl.constexpr,
    Q_RUNS: gl.constexpr,
    K_RUNS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_D: gl.constexpr,
    TAIL_D: gl.constexpr,
    BLOCK_E: gl.constexpr,
    STAGES: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    FOLDED: gl.constexpr,
    ZERO_MASKED: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    DTYPE: gl.constexpr = q_BSHD.dtype
    GROUPS: gl.constexpr = BLOCK_Q // 64
    gl.static_assert(STAGES <= FORWARD_STAGES and Q_FREE + GROUPS <= VALUES_CLEAN, "named barriers overlap")
    sizes: gl.constexpr = ForwardConstants(
        E, V_COLUMN, Q_RUNS, K_RUNS, BLOCK_Q, BLOCK_K, BLOCK_D, TAIL_D, BLOCK_E, GROUPS, STAGES,
        Q_IN_REGISTERS, FIRST, LAST, FOLDED, ZERO_MASKED, ALIGNED,
    )  # fmt: skip
    args = ForwardArguments(
        rows_ptr, extents_ptr, key_extents_ptr, key_tiles_ptr, intervals_ptr, tile_order_ptr, not_finite_ptr, key_mask_BT,
        key_mask_spans_ptr, sinks_ptr, alibi_slopes_ptr, dropout_BH, out_in_BSHE, lse_in_BSH, out_BSHE, lse_BSH, tickets_ptr,
        inner, softcap, threshold, rescale, S, T, H, G, together, total,
    )  # fmt: skip
    q_parts, k_parts = Parts(q_BSHD, q_tail_BSHD), Parts(k_BTGD, k_tail_BTGD)
    q = allocate_parts(q_parts, GROUPS, 64, BLOCK_D, TAIL_D)
    out = q.main
    if BLOCK_D + TAIL_D <= 128:
        out = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 64, 1, BLOCK_D], q_BSHD.layout)
    key_mask, some_hidden, not_finite, first_key, extents = None, None, None, None, None
    if not_finite_ptr is not None:
        not_finite = allocate_numbers(2 * STAGES)
    if intervals_ptr is not None:
        first_key = allocate_numbers(2 * STAGES)
    if extents_ptr is not None:
        extents = gl.allocate_shared_memory(gl.int32, [2 * GROUPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if key_mask_BT is not None:
        key_mask = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        some_hidden = allocate_numbers(STAGES)
    shared = ForwardSharedMemory(
        q,
        allocate_parts(k_parts, STAGES, BLOCK_K, BLOCK_D, TAIL_D),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_K, 1, BLOCK_E], v_BTGE.layout),
        out,
        key_mask,
        some_hidden,
        not_finite,
        first_key,
        extents,
        allocate_numbers(NUMBERS),
        allocate_barriers(GROUPS),
        allocate_barriers(STAGES),
        allocate_barriers(STAGES),
        allocate_barriers(1),
    )
    mbarrier.init(shared.work_full.index(0), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(shared.q_full.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(stage), count=1)
        mbarrier.init(shared.v_full.index(stage), count=1)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (args, shared, sizes, 0)),
                (consumer, (args, shared, sizes, 1)),
                (producer, (q_parts, k_parts, v_BTGE, args, shared, sizes)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (consumer, (args, shared, sizes, 0)),
                (consumer, (args, shared, sizes, 1)),
                (consumer, (args, shared, sizes, 2)),
                (producer, (q_parts, k_parts, v_BTGE, args, shared, sizes)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


class WarpgroupQueries(NamedTuple):
    """A warpgroup's 64 queries: ``q`` in registers or shared memory, local indices ``i``. ``end``: number of the step (key tile)
    after the queries' last step."""

    q: Any
    i: Any
    end: Any


class WarpgroupState(NamedTuple):
    """The state carried from key tile to key tile. ``step``: number of the next key tile. ``acc``: sums of p v. ``p``: of the
    previous tile, not yet multiplied. ``m``: row max in base 2. ``l``: row sum of exponentials."""

    step: Any
    acc: Any
    p: Any
    m: Any
    l: Any


@gluon.jit
def consumer(args, shared, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Compute out and lse of this warpgroup's 64 queries in each query tile, until the producer announces that none is left."""
    taken = gl.to_tensor(0)
    loads = gl.to_tensor(0)
    step = gl.to_tensor(0)
    work = await_tile(taken, shared)
    while work.tiles >= 0:
        if work.tiles > 0:
            step = attend(step, loads, shared, args, work, sizes, GROUP)
            loads += 1
        else:
            leave(shared, args, work, sizes, GROUP)
            if sizes.BLOCK_D + sizes.TAIL_D > 128:  # ``leave`` stored out by way of q's shared memory
                fence_async_shared()
            release(WORK_READ, sizes.GROUPS)
        taken += 1
        work = await_tile(taken, shared)
    release(WORK_READ, sizes.GROUPS)


@gluon.jit
def attend(step, loads, shared, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Compute and store out and lse of a warpgroup's 64 queries; return the number of the step after their last key tile."""
    STAGES: gl.constexpr = sizes.STAGES
    S_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_K)
    i = work.m0 + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([64, sizes.BLOCK_E], gl.float32, accumulator(sizes.BLOCK_E))
    end = step + work.tiles
    run = run_of(args, shared, loads, work, sizes, work.first_run, i, GROUP)
    n0 = tile_at(0, run.tiles) * sizes.BLOCK_K
    mbarrier.wait(shared.q_full.index(GROUP), loads & 1)
    q = tile_of(shared.q, GROUP, sizes.TAIL_D)
    if sizes.Q_IN_REGISTERS:
        q = in_registers(q, S_LAYOUT, 0)
    wait_for_keys(shared, step, end, STAGES)
    if args.intervals is not None:
        n0 = read_number(shared.first_key, step % (2 * STAGES))
    products = multiply_keys(q, shared, step % STAGES, sizes)
    s = scores_under_key_mask(products, q, 0, step % STAGES, shared, args, sizes)
    release(K_FREE + step % STAGES, sizes.GROUPS)
    # Release only now: bar.arrive does not wait for loads in flight, but the instructions above, which use the loads, did.
    release(WORK_READ, sizes.GROUPS)
    OWN: gl.constexpr = sizes.Q_IN_REGISTERS and (args.extents is None or sizes.K_RUNS == 1)  # q and its extents are in registers
    if OWN:
        release(Q_FREE + GROUP, 1)
    weights, m, _ = softmax_step(s, m, run, n0, i, args, work, sizes, True)
    l = row_sum(weights)
    wait_for_keys(shared, step + 1, end, STAGES)
    p = probabilities(weights, step, run, n0, i, shared, args, work, sizes, True, GROUP)
    queries = WarpgroupQueries(q, i, end)
    progress = WarpgroupState(step + 1, acc, p, m, l)
    for number in gl.static_range(sizes.K_RUNS):  # unrolled: in a loop over runs ptxas would copy p at every step
        done = 1
        if sizes.K_RUNS > 1:
            run = run_of(args, shared, loads, work, sizes, number, i, GROUP)
            done = gl.where(number == work.first_run, 1, 0)
        progress = walk(progress, queries, run, done, shared, args, work, sizes, GROUP)
    step, acc, p, m, l = progress
    if sizes.BLOCK_D + sizes.TAIL_D <= 128 and not OWN:
        release(Q_FREE + GROUP, 1)
    acc = multiply_values(acc, p, shared, end - 1, sizes)
    before = seen_before(i, args, work, sizes, GROUP)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    release(V_FREE + (end - 1) % STAGES, sizes.GROUPS)
    finish(acc, m, l, i, before, shared, args, work, sizes, GROUP)
    if sizes.BLOCK_D + sizes.TAIL_D > 128:  # ``finish`` stored out by way of q's shared memory
        fence_async_shared()
        release(Q_FREE + GROUP, 1)
    return end


@gluon.jit
def leave(shared, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Store out and lse of 64 queries that see no key of this shard, at the ring's first and last step only."""
    S_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_K)
    if sizes.FIRST or sizes.LAST:
        i = work.m0 + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        acc = gl.zeros([64, sizes.BLOCK_E], gl.float32, accumulator(sizes.BLOCK_E))
        finish(acc, m, l, i, seen_before(i, args, work, sizes, GROUP), shared, args, work, sizes, GROUP)


@gluon.jit
def walk(progress, queries, run, done, shared, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Visit a run's key tiles, first those that need a mask, but skip the first ``done``. Return the new ``WarpgroupState``."""
    masked = count_partly_seen(run.tiles)
    for t in range(done, masked):
        n0 = partly_seen(t, run.tiles) * sizes.BLOCK_K
        progress = visit_keys(progress, queries, run, n0, shared, args, work, sizes, True, GROUP)
    for t in range(gl.maximum(done - masked, 0), run.tiles.whole_last - run.tiles.whole_first):
        n0 = (run.tiles.whole_last - 1 - t) * sizes.BLOCK_K
        progress = visit_keys(progress, queries, run, n0, shared, args, work, sizes, False, GROUP)
    return progress


@gluon.jit
def visit_keys(
    progress, queries, run, n0, shared, args, work, sizes: gl.constexpr, MASKED: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Visit one key tile, whose softmax overlaps with the previous tile's p v, and return the new state. No product stays in
    flight at the end, because across a loop's edge ptxas would serialize the products."""
    step, acc, p, m, l = progress
    q, i, end = queries
    STAGES: gl.constexpr = sizes.STAGES
    stage = step % STAGES
    if args.intervals is not None and (MASKED or args.alibi_slopes is not None or args.dropout is not None):
        n0 = read_number(shared.first_key, step % (2 * STAGES))
    products = multiply_keys(q, shared, stage, sizes)
    acc = multiply_values(acc, p, shared, step - 1, sizes)
    s = scores_under_key_mask(products, q, 1, stage, shared, args, sizes)
    release(K_FREE + stage, sizes.GROUPS)
    if args.key_mask is not None:  # ends a basic block; otherwise ptxas releases the keys after the softmax
        mbarrier.wait(shared.v_full.index((step - 1) % STAGES), (step - 1) // STAGES & 1)
    weights, m, decay = softmax_step(s, m, run, n0, i, args, work, sizes, MASKED)
    l = l * decay + row_sum(weights)
    # The spin loop of this wait ends a basic block: without it ptxas moves the exponentials behind the next wait.
    wait_for_keys(shared, step + 1, end, STAGES)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    release(V_FREE + (step - 1) % STAGES, sizes.GROUPS)
    p = probabilities(weights, step, run, n0, i, shared, args, work, sizes, MASKED, GROUP)
    return WarpgroupState(step + 1, acc * column(decay, accumulator(sizes.BLOCK_E)), p, m, l)


@gluon.jit
def multiply_keys(q, shared, stage, sizes: gl.constexpr):
    """Issue the asynchronous product q k^T [64, keys], and return it in flight."""
    return multiply_transposed(q, tile_of(shared.k, stage, sizes.TAIL_D), 64, sizes.BLOCK_K, sizes.TAIL_D)


@gluon.jit
def multiply_values(acc, p, shared, step, sizes: gl.constexpr):
    """Wait until the values of a step have arrived, issue acc + p v, and return it in flight."""
    stage = step % sizes.STAGES
    meet()
    mbarrier.wait(shared.v_full.index(stage), step // sizes.STAGES & 1)
    return warpgroup_mma(p, matrix(shared.v.index(stage)), acc, is_async=True)


@gluon.jit
def scores_under_key_mask(products, q, LATER: gl.constexpr, stage, shared, args, sizes: gl.constexpr):
    """Wait for q k^T and return its scores, -inf for keys hidden by the key mask; at most LATER newer products stay in flight.
    The wait keeps q in registers until q k^T is complete."""
    some_hidden = False
    if args.key_mask is not None:
        some_hidden = read_number(shared.some_hidden, stage) != 0
    if sizes.Q_IN_REGISTERS:
        products, _ = warpgroup_mma_wait(LATER, deps=[products, q.main])
    else:
        products = warpgroup_mma_wait(LATER, deps=[products])
    s = scores(products, args, sizes)
    if args.key_mask is not None:  # noqa: SIM102 (known when compiled)
        if some_hidden:
            most = shared.key_mask.index(stage).load(gl.SliceLayout(0, accumulator(sizes.BLOCK_K)))
            s = gl.minimum(s, gl.expand_dims(most, 0))
    return s


@gluon.jit
def wait_for_keys(shared, step, end, STAGES: gl.constexpr):
    """Wait until the keys of a step have arrived, if the step is before ``end``."""
    if step < end:
        mbarrier.wait(shared.k_full.index(step % STAGES), step // STAGES & 1)
