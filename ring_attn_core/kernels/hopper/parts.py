"""Tiles whose columns are stored in one or two parts, and products of such tiles, in Gluon.

    192 columns = main 128 + tail 64        the columns of a tile in Gluon are a power of two
    a b^T = a_main b_main^T + a_tail b_tail^T
    a [b_main b_tail] = [a b_main, a b_tail]

TAIL is the number of columns in the tail, 0 if there is only the main part. Each part of a product is a separate wgmma group, and
waits count these groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from .gluon import copy_tile, wait_for_products
from .register_layouts import accumulator, matrix


class Parts(NamedTuple):
    """The ``main`` and ``tail`` parts of a tile, an accumulator or a TMA descriptor; a missing tail is a placeholder."""

    main: Any
    tail: Any


@gluon.jit
def allocate_parts(source, COUNT: gl.constexpr, ROWS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """Allocate COUNT tiles [ROWS, MAIN + TAIL] in shared memory, in the layouts of ``source``, a ``Parts`` of TMA descriptors."""
    main = gl.allocate_shared_memory(source.main.dtype, [COUNT, 1, ROWS, 1, MAIN], source.main.layout)
    tail = main
    if TAIL > 0:
        tail = gl.allocate_shared_memory(source.main.dtype, [COUNT, 1, ROWS, 1, TAIL], source.tail.layout)
    return Parts(main, tail)


@gluon.jit
def bring_parts(source, batch, token, head, COLUMN: gl.constexpr, full, tiles, index, TAIL: gl.constexpr):
    """Load a tile by TMA from row ``token`` and COLUMN of ``source``; ``full`` must already expect its bytes."""
    copy_tile(source.main, [batch, token, head, COLUMN], full, tiles.main.index(index))
    if TAIL > 0:
        copy_tile(source.tail, [batch, token, head, COLUMN + tiles.main.shape[4]], full, tiles.tail.index(index))


@gluon.jit
def expect_parts(full, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Make an mbarrier expect the bytes of a tile [ROWS, WIDTH] of 16-bit elements."""
    mbarrier.expect(full, 2 * ROWS * WIDTH)


@gluon.jit
def tile_of(tiles, index, TAIL: gl.constexpr):
    """Return the main and tail columns of tile ``index`` as matrices [rows, columns]. The tail is a placeholder if TAIL is 0."""
    main = matrix(tiles.main.index(index))
    tail = main
    if TAIL > 0:
        tail = matrix(tiles.tail.index(index))
    return Parts(main, tail)


@gluon.jit
def in_registers(tile, LAYOUT: gl.constexpr, TAIL: gl.constexpr):
    """Load a tile from shared memory into registers, as left operand of a product whose result has LAYOUT."""
    main = tile.main.load(gl.DotOperandLayout(0, LAYOUT, 2))
    tail = main
    if TAIL > 0:
        tail = tile.tail.load(gl.DotOperandLayout(0, LAYOUT, 2))
    return Parts(main, tail)


@gluon.jit
def zeros_of_parts(ROWS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """Return an accumulator [ROWS, MAIN + TAIL] of zeros."""
    main = gl.zeros([ROWS, MAIN], gl.float32, accumulator(MAIN))
    tail = gl.to_tensor(0)
    if TAIL > 0:
        tail = gl.zeros([ROWS, TAIL], gl.float32, accumulator(TAIL))
    return Parts(main, tail)


@gluon.jit
def multiply_transposed(a, b, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TAIL: gl.constexpr):
    """Issue the asynchronous product a b^T [ROWS, COLUMNS], and return it in flight."""
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    x = warpgroup_mma(a.main, b.main.permute([1, 0]), zero, use_acc=False, is_async=True)
    if TAIL > 0:
        x = warpgroup_mma(a.tail, b.tail.permute([1, 0]), x, is_async=True)
    return x


@gluon.jit
def multiply_add(x, a, b, TAIL: gl.constexpr):
    """Issue the asynchronous product and sum x + a b; return the sum, in flight, and ``a``, which must stay in its registers."""
    OF_MAIN: gl.constexpr = gl.DotOperandLayout(0, x.main.type.layout, 2)
    a = gl.convert_layout(a, OF_MAIN, assert_trivial=True)
    main = warpgroup_mma(a, b.main, x.main, is_async=True)
    tail = x.tail
    if TAIL > 0:
        OF_TAIL: gl.constexpr = gl.DotOperandLayout(0, x.tail.type.layout, 2)
        tail = warpgroup_mma(gl.convert_layout(a, OF_TAIL, assert_trivial=True), b.tail, x.tail, is_async=True)
    return Parts(main, tail), a


@gluon.jit
def wait_for_sum(IN_FLIGHT: gl.constexpr, x, a, TAIL: gl.constexpr):
    """Wait for the sum ``x``, with at most IN_FLIGHT newer wgmma groups in flight; return ``x`` and ``a``, kept in registers."""
    tail = x.tail
    if TAIL > 0:
        main, tail, a = wait_for_products(IN_FLIGHT, deps=[x.main, tail, a])
    else:
        main, a = wait_for_products(IN_FLIGHT, deps=[x.main, a])
    return Parts(main, tail), a
