"""The epilogue of the Hopper forward, in Gluon: what was seen here is merged with what was seen before, and stored."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# (it takes what is known when a kernel is compiled for the class constexpr, and jitted functions for plain ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.rows import load_row
from .register_layouts import accumulator, by_eights, column, matrix, rows_and_columns, rows_by_lines

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def seen_before(i, given, place, sizes: gl.constexpr, GROUP: gl.constexpr):
    """out, laid out as ``by_eights``, and lse of the shards before; for the first shard the sink as lse, or what nobody reads."""
    out, lse = 0.0, 0.0
    if not sizes.FIRST:
        at, inside = elements_of_state(given.out_in, given, place, sizes, GROUP)
        out = gl.load(at, mask=inside, other=0.0)
        at, inside = elements_of_lse(given.lse_in, i, given, place, sizes)
        lse = gl.load(at, mask=inside, other=-float("inf"))
    elif given.sinks is not None:
        lse = gl.load(given.sinks + place.head).to(gl.float32)
    return out, lse


@gluon.jit
def finish(acc, m, l, i, seen, shared, given, place, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Merges the keys seen here with those ``seen_before``, and stores out and lse."""
    DTYPE: gl.constexpr = given.out.dtype.element_ty
    O_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_E)
    _, _, _, q_len, _, _, _, _, _ = load_row(given.rows, place.q_run * sizes.K_RUNS)
    valid = i < q_len
    out_before, before = seen
    if sizes.FIRST and given.sinks is not None:
        before = gl.where(valid, before, -float("inf"))
    l = gl.where(valid, l, 0.0)
    some = gl.where(l > 0, l, 1.0)
    here = m * LN2 + gl.log(some)
    if sizes.FIRST and given.sinks is None:
        weight = 1.0 / some
        lse = gl.where(l > 0, here, -float("inf"))
    else:
        greater = gl.maximum(gl.where(l > 0, here, -float("inf")), before)
        greater = gl.where(greater == -float("inf"), 0.0, greater)
        w_here = gl.where(l > 0, gl.exp(here - greater), 0.0)
        w_before = gl.exp(before - greater)
        lse = gl.where(l > 0, greater + gl.log(w_here + w_before), before)
        both = gl.where(w_here + w_before > 0, w_here + w_before, 1.0)
        weight = w_here / (some * both)
    if given.streams is not None:
        weight *= given.rescale
    acc = gl.where(column(valid, O_LAYOUT), acc, 0.0) * column(weight, O_LAYOUT)
    if not sizes.FIRST:
        out_before = gl.convert_layout(out_before.reshape([64, sizes.BLOCK_E]), O_LAYOUT, assert_trivial=True)
        acc += out_before * column(w_before / both, O_LAYOUT)
    at, inside = elements_of_lse(given.lse, i, given, place, sizes)
    gl.store(at, lse, mask=inside)
    if DTYPE.is_fp32():
        at, inside = elements_of_state(given.out, given, place, sizes, GROUP)
        gl.store(at, by_eights(acc), mask=inside)
    else:
        LINES: gl.constexpr = rows_by_lines(sizes.BLOCK_E)
        tile = matrix(shared.out.index(GROUP)).slice(0, sizes.BLOCK_E, dim=1)
        tile.store(acc.to(DTYPE))
        at, inside = elements_of_out(given, place, sizes, GROUP, LINES)
        gl.store(at, tile.load(LINES), mask=inside)


@gluon.jit
def elements_of_lse(lse, i, given, place, sizes: gl.constexpr):
    """Where the queries' elements of an lse are, and which of them there are."""
    return lse + ((first_token(given, place, sizes) + i) * sizes.H + place.head), i < given.S // sizes.Q_RUNS


@gluon.jit
def elements_of_out(given, place, sizes: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Where 64 queries' elements of out are, and which of them there are.

    What is added to what first is the same to the reader, not to ptxas: here and below it is what leaves nothing on the stack.
    """
    i = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    e = gl.expand_dims(gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(0, LAYOUT)), 0)
    first, row, inside = offsets(i, e, given, place, sizes, GROUP)
    return given.out + (first + row + e), inside


@gluon.jit
def elements_of_state(state, given, place, sizes: gl.constexpr, GROUP: gl.constexpr):
    """The same for a float32 out, laid out as ``by_eights``."""
    i, e = rows_and_columns(64, sizes.BLOCK_E)
    first, row, inside = offsets(i, e, given, place, sizes, GROUP)
    return state + first + (row + e), inside


@gluon.jit
def offsets(i, e, given, place, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Offsets of the first query's elements, of the others' from there on, and which elements there are."""
    m0 = place.m0 + GROUP * 64
    first = ((first_token(given, place, sizes) + m0) * sizes.H + place.head) * sizes.E
    return first, i * (sizes.H * sizes.E), (m0 + i < given.S // sizes.Q_RUNS) & (e < sizes.E)


@gluon.jit
def first_token(given, place, sizes: gl.constexpr):
    """The first of the run of queries, among those of all batch rows."""
    return place.batch.to(gl.int64) * given.S + place.q_run * (given.S // sizes.Q_RUNS)
