"""The warp of the Hopper forward that has TMA fill shared memory, in Gluon."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# (it takes what is known when a kernel is compiled for the class constexpr, and jitted functions for plain ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.loads import some_hidden
from ..portable.rows import load_row
from .barriers import PLACE_READ, Q_FREE, acquire, everywhere, write_number
from .gluon import copy_tile
from .scheduler import key_tiles, place_of, tell, tile_at


@gluon.jit
def producer(q_BSHD, k_BTGD, v_BTGE, given, shared, sizes: gl.constexpr):
    """Takes one tile of queries after the other, and fills the stages: q, then the keys of every tile and the values of the tile
    before, in the order of the consumers."""
    STAGES: gl.constexpr = sizes.STAGES
    step = gl.to_tensor(0)
    loads = gl.to_tensor(0)
    slot = given.S // sizes.Q_RUNS
    place = place_of(take(given), given, sizes)
    tell(place, shared)
    while place.tiles >= 0:
        if place.tiles > 0:
            group = place.head // (sizes.H // sizes.G)
            for each in gl.static_range(sizes.GROUPS):
                if loads > 0:
                    acquire(Q_FREE + each, 1)
                mbarrier.expect(shared.q_full.index(each), 128 * sizes.BLOCK_D)
                at = [place.batch, place.q_run * slot + place.m0 + each * 64, place.head, 0]
                copy_tile(q_BSHD, at, shared.q_full.index(each), shared.q.index(each))
            loads += 1
            at = [place.batch, place.first_token, group, 0]
            fill_keys(k_BTGD, given, shared, at, step, sizes)
            began = step
            before = 0
            for run in range(place.first_run, sizes.K_RUNS):
                pair = place.q_run * sizes.K_RUNS + run
                first, last, whole_first, whole_last = key_tiles(
                    given.rows, given.extents, place.batch, given.S, pair, place.m0, sizes.BLOCK_Q, sizes.BLOCK_K
                )
                _, _, _, _, _, k_base, _, _, _ = load_row(given.rows, pair)
                for t in range(last - first):
                    token = k_base + tile_at(t, first, last, whole_first, whole_last) * sizes.BLOCK_K
                    if step > began:
                        fill_keys(k_BTGD, given, shared, [place.batch, token, group, 0], step, sizes)
                        at = [place.batch, before, group, sizes.V_COLUMN]
                        fill_values(v_BTGE, shared, at, step - 1, sizes)
                    before = token
                    step += 1
            at = [place.batch, before, group, sizes.V_COLUMN]
            fill_values(v_BTGE, shared, at, step - 1, sizes)
        place = place_of(take(given), given, sizes)
        acquire(PLACE_READ, sizes.GROUPS)
        tell(place, shared)
    # No named barrier may stay half full.
    acquire(PLACE_READ, sizes.GROUPS)
    if loads > 0:
        for each in gl.static_range(sizes.GROUPS):
            acquire(Q_FREE + each, 1)
    for left in range(gl.maximum(step - STAGES, 0), step):
        acquire(left % STAGES, sizes.GROUPS)
        acquire(STAGES + left % STAGES, sizes.GROUPS)


@gluon.jit
def take(given):
    """The number of a tile of queries: the first that no program has taken yet."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    address = gl.full([32], 0, gl.int64, EACH) + given.tickets.to(gl.int64)
    text: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.b32 $0, 0; "
        "@p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }"
    )
    ticket = gl.inline_asm_elementwise(text, "=&r,l,~{memory}", [address], dtype=gl.int32, is_pure=False, pack=1)
    return gl.max(ticket, 0)


@gluon.jit
def fill_keys(k_BTGD, given, shared, at, step, sizes: gl.constexpr):
    """The keys of a step, and of a key mask what hides them: read before their stage is free, so that nobody waits for it."""
    BLOCK_K: gl.constexpr = sizes.BLOCK_K
    stage = step % sizes.STAGES
    some = False
    if given.ceiling is not None:
        LINE: gl.constexpr = gl.BlockedLayout([BLOCK_K // 32], [32], [1], [0])
        j = at[1] + gl.arange(0, BLOCK_K, LINE)
        some = some_hidden(given.hidden, at[0], given.T, at[1], BLOCK_K, 16)
        ceiling = gl.full([BLOCK_K], float("inf"), gl.float32, LINE)
        if some:
            ceiling = gl.load(given.ceiling + at[0].to(gl.int64) * given.T + j, mask=j < given.T, other=-float("inf"))
    if step >= sizes.STAGES:
        acquire(stage, sizes.GROUPS)
    if given.ceiling is not None:
        write_number(shared.some_hidden, stage, some.to(gl.int32))
        if some:
            shared.ceiling.index(stage).store(ceiling)
        everywhere("bar.warp.sync 0xffffffff;")
    mbarrier.expect(shared.k_full.index(stage), 2 * BLOCK_K * sizes.BLOCK_D)
    copy_tile(k_BTGD, at, shared.k_full.index(stage), shared.k.index(stage))


@gluon.jit
def fill_values(v_BTGE, shared, at, step, sizes: gl.constexpr):
    """The values of a step, once their stage is free."""
    stage = step % sizes.STAGES
    if step >= sizes.STAGES:
        acquire(sizes.STAGES + stage, sizes.GROUPS)
    mbarrier.expect(shared.v_full.index(stage), 2 * sizes.BLOCK_K * sizes.BLOCK_E)
    copy_tile(v_BTGE, at, shared.v_full.index(stage), shared.v.index(stage))
