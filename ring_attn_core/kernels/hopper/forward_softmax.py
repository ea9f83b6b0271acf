"""The softmax of a tile in the Hopper forward, in Gluon: from products to scores, exponentials and probabilities.

    s_ij = (score in base 2) / factor           the multiply-add of the exponential applies ``factor``
    m_i  = max(m_i so far, factor max_j s_ij)
    w_ij = exp2(factor s_ij - m_i)              p_ij = w_ij if dropout keeps it, else 0

Shapes     products, s, w, p [64 queries, keys] of a warpgroup, in the layout of wgmma's results; row max m, row sum l [64]
Precision  f32; p is rounded once to the input dtype
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..portable.rows import keys_seen, load_row
from .barriers import VALUES_CLEAN, among_consumers, read_number, sync
from .dropout import keep_mask_of_tile
from .instructions import packed_half, special_tanh
from .register_layouts import accumulator, matrix, rows_by_lines
from .scheduler import visible, visible_by_key


@gluon.jit
def scores(products, args, sizes: gl.constexpr):
    """Return the scores s, without ALiBi and divided by ``factor``; ``softmax_step`` adds ALiBi and multiplies by ``factor``."""
    s = products
    if args.softcap is not None:
        s = special_tanh(products * args.inner)
    elif not sizes.FOLDED:
        s = products * args.inner
    return s


@gluon.jit
def row_maximum(x):
    """Return the row max [64] of an accumulator [64, columns]."""
    LAYOUT: gl.constexpr = x.type.layout
    upper, lower = of_thread(x)
    return of_rows(gl.max(maximum_in_order(None, upper), 2), gl.max(maximum_in_order(None, lower), 2), LAYOUT)


@gluon.jit
def row_sum(x):
    """Return the row sum [64] of an accumulator [64, columns]."""
    LAYOUT: gl.constexpr = x.type.layout
    upper, lower = of_thread(x)
    return of_rows(gl.sum(sum_in_order(None, upper), 2), gl.sum(sum_in_order(None, lower), 2), LAYOUT)


@gluon.jit
def of_thread(x):
    """Split an accumulator [64, columns] into the first and last eight of every sixteen rows, each [4 warps, 8 rows, 4 lanes, 2,
    ...]. The dimensions of size 2 index the elements of a row in a thread; the last one selects their first or second half."""
    if x.shape[1] == 128:
        x = x.reshape([4, 2, 8, 2, 2, 2, 2, 4, 2]).permute([0, 2, 7, 8, 6, 5, 4, 3, 1])
    else:
        gl.static_assert(x.shape[1] == 64)
        x = x.reshape([4, 2, 8, 2, 2, 2, 4, 2]).permute([0, 2, 6, 7, 5, 4, 3, 1])
    return gl.split(x)


@gluon.jit
def of_rows(upper, lower, LAYOUT: gl.constexpr):
    """Join two arrays [4, 8], one number per upper row and per lower row (see ``of_thread``), to one number per row, [64]."""
    ROWS: gl.constexpr = gl.DistributedLinearLayout([], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]], [], [4, 8])
    upper = gl.convert_layout(upper, ROWS, assert_trivial=True)
    lower = gl.convert_layout(lower, ROWS, assert_trivial=True)
    x = gl.join(upper, lower).permute([0, 2, 1]).reshape([64])
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def maximum_in_order(m, x):
    """Return for each thread the maximum of m (may be None) and its elements of x, compared one after the other. ``gl.max`` of
    Triton 3.8 and later reduces by pairs and takes more registers: ptxas starts the first row's exponentials later, and the
    forward is 2 to 3 % slower."""
    if len(x.shape) > 3:
        first, second = gl.split(x)
        m = maximum_in_order(maximum_in_order(m, first), second)
    elif m is None:
        m = x
    else:
        m = gl.maximum(m, x)
    return m


@gluon.jit
def sum_in_order(l, x):
    """Return for each thread the sum of l and its elements of x, added in order. Arguments are as in ``maximum_in_order``."""
    if len(x.shape) > 3:
        first, second = gl.split(x)
        l = sum_in_order(sum_in_order(l, first), second)
    elif l is None:
        l = x
    else:
        l += x
    return l


@gluon.jit
def softmax_step(s, m, run, n0, i, args, work, sizes: gl.constexpr, MASKED: gl.constexpr):
    """Take one step of online softmax; return exp2(score - row max), the new row max, and the factor that rescales old sums."""
    columns = gl.arange(0, sizes.BLOCK_K, gl.SliceLayout(0, s.type.layout))
    factor = 1.0
    if args.softcap is not None:
        factor = args.softcap
    elif sizes.FOLDED:
        factor = args.inner
    if args.alibi_slopes is not None:
        # k_pos - q_pos as integers in float32: the part of the keys is the same in every tile, and near keys are exact.
        ahead = gl.expand_dims((run.stride * columns).to(gl.float32), 0)
        ahead -= gl.expand_dims((run.q_start - run.k_start + run.stride * (i - n0)).to(gl.float32), 1)
        s += ahead * (run.slope / factor)
    if MASKED:
        s = gl.where(visible(columns, run.begin - n0, run.end - n0), s, -float("inf"))
        if args.key_extents is not None:
            s = gl.where(visible_by_key(columns, i, n0, run, args, work), s, -float("inf"))
    m_new = gl.maximum(m, row_maximum(s) * factor)
    if MASKED or args.key_mask is not None:
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    else:
        shift = m_new
    return gl.exp2(s * factor - gl.expand_dims(shift, 1)), m_new, gl.exp2(m - shift)


@gluon.jit
def probabilities(weights, step, run, n0, i, shared, args, work, sizes: gl.constexpr, MASKED: gl.constexpr, GROUP: gl.constexpr):
    """Return the softmax weights after dropout in 16 bits, as left operand of p v; zero values that no query sees."""
    if args.dropout is not None:
        stream = gl.load(args.dropout + work.batch * args.H + work.head)
        first = work.m0 + GROUP * 64
        keep = keep_mask_of_tile(
            stream, args.threshold, i, first, n0, run.q_start, run.k_start, run.stride, sizes.BLOCK_K, sizes.ALIGNED
        )
        weights = gl.where(keep, weights, 0.0)
    half = packed_half(weights, shared.q.main.dtype)
    if MASKED and sizes.ZERO_MASKED > 0:
        stage = step % sizes.STAGES
        some_nan = True
        if args.not_finite is not None:
            some_nan = read_number(shared.not_finite, step % (2 * sizes.STAGES)) != 0
        if some_nan:
            mbarrier.wait(shared.v_full.index(stage), step // sizes.STAGES & 1)
            hide_unseen(matrix(shared.v.index(stage)), run, n0, args, work, sizes, GROUP)
    return gl.convert_layout(half, gl.DotOperandLayout(0, accumulator(sizes.BLOCK_E), 2), assert_trivial=True)


@gluon.jit
def hide_unseen(tile, run, n0, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Zero the rows of a key or value tile that no query of the program sees, because 0 times NaN is NaN."""
    HALF: gl.constexpr = sizes.BLOCK_K // 2
    S_LAYOUT: gl.constexpr = accumulator(HALF)
    LINES: gl.constexpr = rows_by_lines(tile.shape[1])
    row = load_row(args.rows, run.pair)
    if args.extents is None and args.key_extents is None:
        seen_end = gl.minimum(gl.minimum(work.m0 + sizes.BLOCK_Q, row.q_len) - row.lo, row.k_len)
        some_unseen = (n0 < work.m0 - row.hi) | (n0 + sizes.BLOCK_K > seen_end)
    else:
        some_unseen = n0 >= 0
    if some_unseen:
        if GROUP < 2:
            first = n0 + GROUP * HALF
            columns = gl.arange(0, HALF, gl.SliceLayout(0, S_LAYOUT))
            seen = gl.zeros([64, HALF], gl.int32, S_LAYOUT)
            for group in gl.static_range(sizes.GROUPS):
                i = work.m0 + group * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
                begin, end = keys_seen(i, args.extents, work.batch, args.S, row)
                sees = visible(columns, begin - first, end - first)
                if args.key_extents is not None:
                    sees &= visible_by_key(columns, i, first, run, args, work)
                seen |= sees.to(gl.int32)
            seen = gl.convert_layout(gl.max(seen, 0), gl.SliceLayout(1, LINES))
            half = tile.slice(GROUP * HALF, HALF, 0)
            half.store(gl.where(gl.expand_dims(seen, 1) > 0, half.load(LINES), 0.0))
            fence_async_shared()
        sync(VALUES_CLEAN, among_consumers(sizes.GROUPS), 4)
