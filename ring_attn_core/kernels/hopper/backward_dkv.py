"""The tile of keys of a program of the Hopper backward: which of them are seen, and where their gradients go, in Gluon."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..portable.rows import load_row
from .backward_scheduler import BLOCK_K
from .register_layouts import by_eights, matrix, rows_and_columns, rows_by_lines


@gluon.jit
def keys_seen_by_some(given, place, sizes: gl.constexpr, j):
    """Which keys of the run some query of the shard sees, by the band, the length and the key mask."""
    some = gl.zeros_like(j)
    for q_run in range(sizes.Q_RUNS):
        lo, hi, _, q_len, _, _, k_len, _, _ = load_row(given.rows, q_run * sizes.K_RUNS + place.k_run)
        seen = (j < k_len) & (gl.maximum(j + lo, 0) < gl.minimum(j + hi + 1, q_len))
        some |= seen.to(gl.int32)
    if given.ceiling is not None:
        at = place.batch.to(gl.int64) * given.T + place.k_run * place.slot + j
        ceiling = gl.load(given.ceiling + at, mask=some > 0, other=-float("inf"))
        some = gl.where(ceiling > 0.0, some, 0)
    return some > 0


@gluon.jit
def hide_unseen(given, shared, place, sizes: gl.constexpr):
    """Keys and values that no query sees become 0, since 0 times NaN is NaN.

    With extents, of which each query may see others, what is not finite becomes 0, seen or not: who sees it has NaN in out, but
    not, as without extents, in every gradient.
    """
    LINES: gl.constexpr = rows_by_lines(sizes.BLOCK_D, 8)
    j = place.n0 + gl.arange(0, BLOCK_K, gl.SliceLayout(1, LINES))
    seen = gl.expand_dims(keys_seen_by_some(given, place, sizes, j), 1)
    for tile in gl.static_range(2):
        half = matrix(shared.k.index(0) if tile == 0 else shared.v.index(0))
        x = half.load(LINES)
        if given.extents is not None:
            x = gl.where(gl.abs(x.to(gl.float32)) < float("inf"), x, 0.0)
        half.store(gl.where(seen, x, 0.0))
    fence_async_shared()


@gluon.jit
def finish(
    x, before, to, COLUMN: gl.constexpr, tile, STRIDE: gl.constexpr, WIDTH: gl.constexpr,
    given, place, sizes: gl.constexpr,
):  # fmt: skip
    """Adds what came before to the gradients of the keys, and stores them."""
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    DTYPE: gl.constexpr = to.dtype.element_ty
    if to.dtype.element_ty == gl.float32:
        x = by_eights(x, 8)
        row, column = rows_and_columns(BLOCK_K, BLOCK_D, 8)
        if not sizes.FIRST:
            at, inside = elements(before + COLUMN, row, column, given, place, sizes, STRIDE, WIDTH)
            x += gl.load(at, mask=inside, other=0.0)
        at, inside = elements(to + COLUMN, row, column, given, place, sizes, STRIDE, WIDTH)
        gl.store(at, x, mask=inside)
    else:
        LINES: gl.constexpr = rows_by_lines(BLOCK_D, 8)
        half = matrix(tile)
        half.store(x.to(DTYPE))
        row = gl.expand_dims(gl.arange(0, BLOCK_K, gl.SliceLayout(1, LINES)), 1)
        column = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, LINES)), 0)
        at, inside = elements(to + COLUMN, row, column, given, place, sizes, STRIDE, WIDTH)
        gl.store(at, half.load(LINES), mask=inside)


@gluon.jit
def elements(start, row, column, given, place, sizes: gl.constexpr, STRIDE: gl.constexpr, WIDTH: gl.constexpr):
    """Where the elements of the keys are, and which of them there are."""
    token = place.batch.to(gl.int64) * given.T + place.k_run * place.slot + place.n0
    start += (token * sizes.G + place.group) * STRIDE
    return start + (row * (sizes.G * STRIDE) + column), (place.n0 + row < place.slot) & (column < WIDTH)
