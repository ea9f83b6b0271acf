"""The epilogue of the Hopper forward, in Gluon: what was seen here is merged with what was seen before, and stored."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# (it takes what is known when a kernel is compiled for the class constexpr, and jitted functions for plain ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_common import accumulator, column, matrix, rows_by_lines
from .triton_common import load_row

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def finish(acc, m, l, i, shared, given, place, sizes: gl.constexpr, GROUP: gl.constexpr):
    """Merges the keys seen here with those seen before, and stores out and lse."""
    DTYPE: gl.constexpr = given.out.dtype.element_ty
    O_LAYOUT: gl.constexpr = accumulator(sizes.BLOCK_E)
    _, _, _, q_len, _, _, _, _, _ = load_row(given.rows, place.q_run * sizes.K_RUNS)
    slot = given.S // sizes.Q_RUNS
    valid, inside = i < q_len, i < slot
    token = place.batch.to(gl.int64) * given.S + place.q_run * slot + place.m0 + GROUP * 64
    at_lse = (token + (i - place.m0 - GROUP * 64)) * sizes.H + place.head
    if not sizes.FIRST:
        at_out, inside_out = elements_of_out(token, slot, place, sizes, GROUP, O_LAYOUT)
        out_in = gl.load(given.out_in + at_out, mask=inside_out, other=0.0)
        before = gl.load(given.lse_in + at_lse, mask=inside, other=-float("inf"))
    elif given.sinks is not None:
        before = gl.where(valid, gl.load(given.sinks + place.head).to(gl.float32), -float("inf"))
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
        acc += out_in * column(w_before / both, O_LAYOUT)
    gl.store(given.lse + at_lse, lse, mask=inside)
    if DTYPE.is_fp32():
        at_out, inside_out = elements_of_out(token, slot, place, sizes, GROUP, O_LAYOUT)
        gl.store(given.out + at_out, acc, mask=inside_out)
    else:
        LINES: gl.constexpr = rows_by_lines(sizes.BLOCK_E)
        tile = matrix(shared.out.index(GROUP)).slice(0, sizes.BLOCK_E, dim=1)
        tile.store(acc.to(DTYPE))
        at_out, inside_out = elements_of_out(token, slot, place, sizes, GROUP, LINES)
        gl.store(given.out + at_out, tile.load(LINES), mask=inside_out)


@gluon.jit
def elements_of_out(token, slot, place, sizes: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of the elements of out of 64 queries from a token of all on, and which of them there are."""
    i = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    e = gl.expand_dims(gl.arange(0, sizes.BLOCK_E, gl.SliceLayout(0, LAYOUT)), 0)
    inside = (place.m0 + GROUP * 64 + i < slot) & (e < sizes.E)
    return (token * sizes.H + place.head) * sizes.E + i * (sizes.H * sizes.E) + e, inside
