"""The key side of the Hopper backward, in Gluon: zeroing keys and values that no query sees, and storing dk and dv.

    dk, dv = gradients of this step of the ring + dk_in, dv_in        without dk_in, dv_in if FIRST

Shapes     a tile of 128 keys in 8 warps, or of 64 keys in 4 warps; dk_BTGD, dv_BTGE, or both packed in one array
State      with FIRST, dk and dv start at 0; else at dk_in and dv_in (f32), which they may overwrite in place. FIRST is set at the
           ring's first step; the one-pass backward sets it at every step
Precision  f32; if the keys do not travel along the ring, their only step (FIRST) completes dk and dv and rounds them to 16 bits
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..portable.rows import load_row
from .register_layouts import by_eights, rows_and_columns, rows_by_lines


@gluon.jit
def keys_seen_by_some(args, work, sizes: gl.constexpr, j):
    """Return the mask of keys ``j`` that some query of the shard sees, by the band, the runs' lengths and the key mask."""
    some = gl.zeros_like(j)
    for q_run in range(sizes.Q_RUNS):
        row = load_row(args.rows, q_run * sizes.K_RUNS + work.k_run)
        seen = (j < row.k_len) & (gl.maximum(j + row.lo, 0) < gl.minimum(j + row.hi + 1, row.q_len))
        some |= seen.to(gl.int32)
    if args.key_mask is not None:
        at = work.batch.to(gl.int64) * args.T + work.k_run * work.k_slot + j
        most = gl.load(args.key_mask + at, mask=some > 0, other=-float("inf"))
        some = gl.where(most > 0.0, some, 0)
    return some > 0


@gluon.jit
def hide_unseen(tile, args, work, sizes: gl.constexpr):
    """Zero the keys or values in ``tile`` that no query sees: they may hold NaN, and 0 times NaN is NaN. With extents, also zero
    all that are not finite; a query that sees a NaN may then get some finite gradients."""
    LINES: gl.constexpr = rows_by_lines(tile.shape[1], gl.num_warps())
    j = work.n0 + gl.arange(0, sizes.BLOCK_K, gl.SliceLayout(1, LINES))
    seen = gl.expand_dims(keys_seen_by_some(args, work, sizes, j), 1)
    x = tile.load(LINES)
    if args.query_tiles is not None:
        x = gl.where(gl.abs(x.to(gl.float32)) < float("inf"), x, 0.0)
    tile.store(gl.where(seen, x, 0.0))
    fence_async_shared()


@gluon.jit
def finish(
    x, before, to, COLUMN: gl.constexpr, tile, STRIDE: gl.constexpr, WIDTH: gl.constexpr,
    args, work, sizes: gl.constexpr,
):  # fmt: skip
    """Store the gradients ``x`` in WIDTH columns of ``to`` from COLUMN on, plus those of earlier steps unless FIRST. Results in
    16 bits pass through the shared-memory ``tile``."""
    COLUMNS: gl.constexpr = x.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = to.dtype.element_ty
    if to.dtype.element_ty == gl.float32:
        x = by_eights(x, WARPS)
        row, column = rows_and_columns(sizes.BLOCK_K, COLUMNS, WARPS)
        if not sizes.FIRST:
            at, inside = elements(before + COLUMN, row, column, args, work, sizes, STRIDE, WIDTH)
            x += gl.load(at, mask=inside, other=0.0)
        at, inside = elements(to + COLUMN, row, column, args, work, sizes, STRIDE, WIDTH)
        gl.store(at, x, mask=inside)
    else:
        gl.static_assert(sizes.FIRST, "gradients of 16 bits are complete: keys that do not travel have one step")
        LINES: gl.constexpr = rows_by_lines(COLUMNS, WARPS)
        tile.store(x.to(DTYPE))
        row = gl.expand_dims(gl.arange(0, sizes.BLOCK_K, gl.SliceLayout(1, LINES)), 1)
        column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, LINES)), 0)
        at, inside = elements(to + COLUMN, row, column, args, work, sizes, STRIDE, WIDTH)
        gl.store(at, tile.load(LINES), mask=inside)


@gluon.jit
def elements(start, row, column, args, work, sizes: gl.constexpr, STRIDE: gl.constexpr, WIDTH: gl.constexpr):
    """Return pointers to elements of the program's key tile in an array, and the mask of the elements inside the array.
    ``start``: the tile's first column in the array's first token and key head. STRIDE: columns of a key head in the array. WIDTH:
    columns of the tile without padding."""
    token = work.batch.to(gl.int64) * args.T + work.k_run * work.k_slot + work.n0
    start += (token * args.G + work.group) * STRIDE
    return start + (row * (args.G * STRIDE) + column), (work.n0 + row < work.k_slot) & (column < WIDTH)
