"""The warp of the Hopper forward that has TMA fill shared memory, in Gluon."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# (it takes what is known when a kernel is compiled for the class constexpr, and jitted functions for plain ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon import copy_tile
from .hopper_common import acquire, prefetch
from .hopper_walk import key_tiles, tile_at
from .triton_common import load_row


@gluon.jit
def producer(q_BSHD, k_BTGD, v_BTGE, given, shared, place, sizes: gl.constexpr):
    """Fills the stages: q, then the keys of every tile and the values of the tile before, in the order of the consumers."""
    STAGES: gl.constexpr = sizes.STAGES
    if place.tiles > 0:
        group = place.head // (sizes.H // sizes.G)
        for each in gl.static_range(sizes.GROUPS):
            mbarrier.expect(shared.q_full.index(each), 128 * sizes.BLOCK_D)
            at = [place.batch, place.q_run * place.slot + place.m0 + each * 64, place.head, 0]
            copy_tile(q_BSHD, at, shared.q_full.index(each), shared.q.index(each))
        fill(k_BTGD, shared.k, shared.k_full, [place.batch, place.first_token, group, 0], 0, 0, sizes, sizes.BLOCK_D)
        if not sizes.FIRST:
            # What the epilogue reads: fetched now, since every program of a wave reaches its epilogue at the same time.
            i = gl.arange(0, sizes.BLOCK_Q, gl.BlockedLayout([sizes.BLOCK_Q // 32], [32], [1], [0]))
            row = place.batch.to(gl.int64) * given.S + place.q_run * place.slot + gl.minimum(place.m0 + i, place.slot - 1)
            prefetch(given.out_in + (row * sizes.H + place.head) * sizes.E, 4 * sizes.E)
        step = 0
        before = 0
        for run in range(place.first_run, sizes.K_RUNS):
            pair = place.q_run * sizes.K_RUNS + run
            first, last, whole_first, whole_last = key_tiles(
                given.rows, given.extents, place.batch, given.S, pair, place.m0, sizes.BLOCK_Q, sizes.BLOCK_K
            )
            _, _, _, _, _, k_base, _, _, _ = load_row(given.rows, pair)
            for t in range(last - first):
                token = k_base + tile_at(t, first, last, whole_first, whole_last) * sizes.BLOCK_K
                if step > 0:
                    fill(k_BTGD, shared.k, shared.k_full, [place.batch, token, group, 0], step, 0, sizes, sizes.BLOCK_D)
                    at = [place.batch, before, group, sizes.V_COLUMN]
                    fill(v_BTGE, shared.v, shared.v_full, at, step - 1, STAGES, sizes, sizes.BLOCK_E)
                before = token
                step += 1
        at = [place.batch, before, group, sizes.V_COLUMN]
        fill(v_BTGE, shared.v, shared.v_full, at, step - 1, STAGES, sizes, sizes.BLOCK_E)
        for left in range(gl.maximum(step - STAGES, 0), step):  # no named barrier may stay half full
            acquire(left % STAGES, sizes.GROUPS)
            acquire(STAGES + left % STAGES, sizes.GROUPS)


@gluon.jit
def fill(source, tiles, full, at, step, BARRIERS: gl.constexpr, sizes: gl.constexpr, WIDTH: gl.constexpr):
    """The tile of a step into its stage, once that is free."""
    stage = step % sizes.STAGES
    if step >= sizes.STAGES:
        acquire(BARRIERS + stage, sizes.GROUPS)
    mbarrier.expect(full.index(stage), 2 * sizes.BLOCK_K * WIDTH)
    copy_tile(source, at, full.index(stage), tiles.index(stage))
