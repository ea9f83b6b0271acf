"""Layouts of tiles in registers and in shared memory, in Gluon.

    accumulator            wgmma's results: 64 rows per warpgroup; four lanes share a row, each has pairs of adjacent columns
    by_eights              the same registers with shape [rows, columns / 8, 8]: constant offsets between a thread's elements
    rows_by_lines          16-bit elements; each warp reads and writes whole rows and cache lines

``here`` hides the value of an integer from the compiler.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon import constexpr_function


@constexpr_function
def accumulator(width, warps=4):
    """Return the layout of wgmma's results [16 * warps, width]: each warpgroup holds 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 16])


@gluon.jit
def matrix(tile):
    """Reshape a tile in shared memory from TMA's [1, rows, 1, columns] to [rows, columns]."""
    return tile.reshape([tile.shape[1], tile.shape[3]])


@gluon.jit
def here(x):
    """Return x through an opaque instruction, so that addresses that depend on it are computed after this call, not far earlier.
    Without it the backward reloads 5 spilled registers in each step and 26 in total (Triton 3.6, heads of 128)."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def column(x, LAYOUT: gl.constexpr):
    """Return x [64] as a column that broadcasts against a matrix of layout LAYOUT."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True), 1)


@constexpr_function
def accumulator_by_eights(rows, columns, warps=4):
    """Return the layout of wgmma's results after a reshape from [rows, columns] to [rows, columns / 8, 8]. A thread then needs
    one address per row, plus constant offsets, instead of one per element, in a pair of registers."""
    eights = [[0, 1 << bit, 0] for bit in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warp_bases = [[16 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 1], [8, 0, 0], *eights], lanes, warp_bases, [], [rows, columns // 8, 8])


@gluon.jit
def by_eights(x, WARPS: gl.constexpr = 4):
    """Reshape wgmma's results [rows, columns] to [rows, columns / 8, 8] without moving data between registers."""
    LAYOUT: gl.constexpr = accumulator_by_eights(x.shape[0], x.shape[1], WARPS)
    return gl.convert_layout(x.reshape([x.shape[0], x.shape[1] // 8, 8]), LAYOUT, assert_trivial=True)


@gluon.jit
def rows_and_columns(ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr = 4):
    """Return row indices [rows, 1, 1] and column indices [1, columns / 8, 8], int64 to stay constant offsets in the compiler."""
    LAYOUT: gl.constexpr = accumulator_by_eights(ROWS, COLUMNS, WARPS)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    in_eight = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    row = gl.expand_dims(gl.expand_dims(row, 1), 2)
    eight = gl.expand_dims(gl.expand_dims(eight, 0), 2)
    in_eight = gl.expand_dims(gl.expand_dims(in_eight, 0), 1)
    return row, 8 * eight.to(gl.int64) + in_eight


@constexpr_function
def rows_by_lines(width, warps=4):
    """Return a layout of 16-bit tiles [rows, width] in which each warp reads and writes whole rows and cache lines."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])
