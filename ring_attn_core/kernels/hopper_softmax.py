"""What the Hopper forward's warpgroups make of a tile's products: scores, their exponentials, probabilities, in Gluon."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# (it takes what is known when a kernel is compiled for the class constexpr, and jitted functions for plain ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .hopper_common import (
    VALUES_CLEAN,
    accumulator,
    barrier,
    barrier_text,
    kept_of_tile,
    matrix,
    packed_half,
    rows_by_lines,
    special_tanh,
)
from .hopper_walk import visible
from .triton_common import keys_seen, load_row


@gluon.jit
def scores(products, given, sizes: gl.constexpr):
    """Scores in base 2 over ``softmax_step``'s factor, which is positive and goes into the exponential's multiply-add."""
    s = products
    if given.cap is not None:
        s = special_tanh(products * given.inner)
    elif not sizes.FOLDED:
        s = products * given.inner
    return s


@gluon.jit
def softmax_step(s, m, run, key, i, given, place, sizes: gl.constexpr, MASKED: gl.constexpr):
    """exp2 of a tile's ``scores`` less the greatest so far, that one, and the factor for what was summed before."""
    columns = gl.arange(0, sizes.BLOCK_K, gl.SliceLayout(0, s.type.layout))
    factor = 1.0
    if given.cap is not None:
        factor = given.cap
    elif sizes.FOLDED:
        factor = given.inner
    if given.slopes is not None:
        # How far a key is ahead of a query: as whole numbers in float32, a key's the same in every tile, and exact where near.
        ahead = gl.expand_dims((run.stride * columns).to(gl.float32), 0)
        ahead -= gl.expand_dims((run.q_start - run.k_start + run.stride * (i - key)).to(gl.float32), 1)
        s += ahead * (run.slope / factor)
    if MASKED:
        s = gl.where(visible(columns, run.begin - key, run.end - key), s, -float("inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    if MASKED or given.ceiling is not None:
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    else:
        shift = m_new
    return gl.exp2(s * factor - gl.expand_dims(shift, 1)), m_new, gl.exp2(m - shift)


@gluon.jit
def probabilities(
    weights, step, run, key, i, shared, given, place, sizes: gl.constexpr, MASKED: gl.constexpr, GROUP: gl.constexpr
):
    """The weights as the first factor of a product with the step's values; 0 where dropout drops them."""
    if given.streams is not None:
        stream = gl.load(given.streams + place.batch * sizes.H + place.head)
        first = place.m0 + GROUP * 64
        keep = kept_of_tile(
            stream, given.threshold, i, first, key, run.q_start, run.k_start, run.stride, sizes.BLOCK_K, sizes.ALIGNED
        )
        weights = gl.where(keep, weights, 0.0)
    half = packed_half(weights, shared.q.dtype)
    if MASKED and sizes.CLEAN > 0:
        hide_unseen(shared, step, run, key, given, place, sizes, GROUP)
    return gl.convert_layout(half, gl.DotOperandLayout(0, accumulator(sizes.BLOCK_E), 2), assert_trivial=True)


@gluon.jit
def hide_unseen(shared, step, run, key, given, place, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Values that no query of the program sees become 0: 0 times NaN would be NaN. Two warpgroups see to half of them each."""
    HALF: gl.constexpr = sizes.BLOCK_K // 2
    S_LAYOUT: gl.constexpr = accumulator(HALF)
    LINES: gl.constexpr = rows_by_lines(sizes.BLOCK_E)
    lo, hi, q_base, q_len, q_start, k_base, k_len, k_start, stride = load_row(given.rows, run.pair)
    mbarrier.wait(shared.v_full.index(step % sizes.STAGES), step // sizes.STAGES & 1)
    if given.extents is None:
        seen_end = gl.minimum(gl.minimum(place.m0 + sizes.BLOCK_Q, q_len) - lo, k_len)
        some_unseen = (key < place.m0 - hi) | (key + sizes.BLOCK_K > seen_end)
    else:
        some_unseen = key >= 0
    if some_unseen:
        if GROUP < 2:
            first = key + GROUP * HALF
            columns = gl.arange(0, HALF, gl.SliceLayout(0, S_LAYOUT))
            seen = gl.zeros([64, HALF], gl.int32, S_LAYOUT)
            for group in gl.static_range(sizes.GROUPS):
                i = place.m0 + group * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
                begin, end = keys_seen(i, given.extents, place.batch, given.S, lo, hi, q_base, q_len, k_len, k_start, stride)
                seen |= visible(columns, begin - first, end - first).to(gl.int32)
            seen = gl.convert_layout(gl.max(seen, 0), gl.SliceLayout(1, LINES))
            tile = matrix(shared.v.index(step % sizes.STAGES)).slice(GROUP * HALF, HALF, 0)
            tile.store(gl.where(gl.expand_dims(seen, 1) > 0, tile.load(LINES), 0.0))
            fence_async_shared()
        barrier(barrier_text("sync", sizes.GROUPS * 128), VALUES_CLEAN, 4)
