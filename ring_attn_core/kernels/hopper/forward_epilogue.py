"""The epilogue of the Hopper forward, in Gluon: merge this shard's (out, lse) with those of earlier shards, and store both.

    lse_here = ln(2) m + log l                         natural log
    lse      = log(exp(lse_here) + exp(lse_before))    out = out_here exp(lse_here - lse) + out_before exp(lse_before - lse)

Shapes     acc [64 queries, BLOCK_E] and m, l [64] in the layout of wgmma's results; out_BSHE, lse_BSH
State      at the first shard lse_before is the sink, or absent without sinks
Precision  f32; out is rounded once to its dtype
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.rows import load_row
from ..portable.scores import LN2
from .register_layouts import accumulator, by_eights, column, matrix, rows_and_columns, rows_by_lines


@gluon.jit
def seen_before(i, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Load the earlier shards' out, in the layout ``by_eights``, and lse (at first the sink); return 0 if missing."""
    out, lse = 0.0, 0.0
    if not sizes.FIRST:
        at, inside = elements_of_out_f32(args.out_in, args, work, sizes, GROUP)
        out = gl.load(at, mask=inside, other=0.0)
        at, inside = elements_of_lse(args.lse_in, i, args, work, sizes)
        lse = gl.load(at, mask=inside, other=-float("inf"))
    elif args.sinks is not None:
        lse = gl.load(args.sinks + work.head).to(gl.float32)
    return out, lse


@gluon.jit
def finish(acc, m, l, i, before, shared, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Merge this shard's (out, lse) with ``before``, the result of ``seen_before``, and store the merged (out, lse)."""
    DTYPE: gl.constexpr = args.out.dtype.element_ty
    O_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_E)
    valid = i < load_row(args.rows, work.q_run * sizes.K_RUNS).q_len
    out_before, lse_before = before
    if sizes.FIRST and args.sinks is not None:
        lse_before = gl.where(valid, lse_before, -float("inf"))
    l = gl.where(valid, l, 0.0)
    some = gl.where(l > 0, l, 1.0)
    here = m * LN2 + gl.log(some)
    if sizes.FIRST and args.sinks is None:
        weight = 1.0 / some
        lse = gl.where(l > 0, here, -float("inf"))
    else:
        greater = gl.maximum(gl.where(l > 0, here, -float("inf")), lse_before)
        greater = gl.where(greater == -float("inf"), 0.0, greater)
        w_here = gl.where(l > 0, gl.exp(here - greater), 0.0)
        w_before = gl.exp(lse_before - greater)
        lse = gl.where(l > 0, greater + gl.log(w_here + w_before), lse_before)
        both = gl.where(w_here + w_before > 0, w_here + w_before, 1.0)
        weight = w_here / (some * both)
    if args.dropout is not None:
        weight *= args.rescale
    acc = gl.where(column(valid, O_LAYOUT), acc, 0.0) * column(weight, O_LAYOUT)
    if not sizes.FIRST:
        out_before = gl.convert_layout(out_before.reshape([64, sizes.BLOCK_E]), O_LAYOUT, assert_trivial=True)
        acc += out_before * column(w_before / both, O_LAYOUT)
    at, inside = elements_of_lse(args.lse, i, args, work, sizes)
    gl.store(at, lse, mask=inside)
    if DTYPE.is_fp32():
        at, inside = elements_of_out_f32(args.out, args, work, sizes, GROUP)
        gl.store(at, by_eights(acc), mask=inside)
    else:
        LINES: gl.constexpr = rows_by_lines(sizes.BLOCK_E)
        tile = matrix(shared.out.index(GROUP)).slice(0, sizes.BLOCK_E, dim=1)
        tile.store(acc.to(DTYPE))
        at, inside = elements_of_out(args, work, sizes, GROUP, LINES)
        gl.store(at, tile.load(LINES), mask=inside)


@gluon.jit
def elements_of_lse(lse, i, args, work, sizes: gl.constexpr):
    """Return pointers to the lse of the queries ``i``, and the mask of the queries that lie inside the run."""
    return lse + ((first_token(args, work, sizes) + i) * args.H + work.head), i < args.S // sizes.Q_RUNS


@gluon.jit
def elements_of_out(args, work, sizes: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Return pointers to the out of a warpgroup's 64 queries, and the mask of the elements inside the array. Keep the order of
    additions, here and below: with other orders ptxas spills registers to the stack."""
    i = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    e = gl.expand_dims(gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(0, LAYOUT)), 0)
    first, row, inside = offsets(i, e, args, work, sizes, GROUP)
    return args.out + (first + row + e), inside


@gluon.jit
def elements_of_out_f32(out, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Return pointers and mask as ``elements_of_out`` does, for a float32 out in the layout ``by_eights``."""
    i, e = rows_and_columns(64, sizes.BLOCK_E)
    first, row, inside = offsets(i, e, args, work, sizes, GROUP)
    return out + first + (row + e), inside


@gluon.jit
def offsets(i, e, args, work, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Return the first query's offset in out, each row's offset from that query, and the mask of elements inside the array."""
    m0 = work.m0 + GROUP * 64
    first = ((first_token(args, work, sizes) + m0) * args.H + work.head) * sizes.E
    return first, i * (args.H * sizes.E), (m0 + i < args.S // sizes.Q_RUNS) & (e < sizes.E)


@gluon.jit
def first_token(args, work, sizes: gl.constexpr):
    """Return the index of the query run's first token, counted over all batch rows."""
    return work.batch.to(gl.int64) * args.S + work.q_run * (args.S // sizes.Q_RUNS)
