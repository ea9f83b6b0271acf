"""What the Hopper kernels share, in Gluon: barriers, layouts in registers and in shared memory, dropout.

A program is made of warpgroups that consume, of 64 query rows each, and one warp that produces: it has TMA fill rings of tiles in
shared memory. A full stage is announced by an mbarrier; an empty one by a named barrier (bar.arrive, bar.sync), since around
mbarrier.arrive Triton (3.6, 3.7) has the warps of a warpgroup wait for each other. Consumers meet only to clear hidden values.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# (it takes what is known when a kernel is compiled for the class constexpr, and jitted functions for plain ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon import constexpr_function
from .triton_common import halves_kept, kept, philox2x32, quarters_kept

FIRST_BARRIER = gl.constexpr(6)
"""Named barriers have ids 0 to 15, of which Triton takes 0, 1 and one for each partition."""
PLACE_READ = gl.constexpr(4)
Q_FREE = gl.constexpr(5)
VALUES_CLEAN = gl.constexpr(8)
"""Barriers of the forward behind those of its two stages of keys and of values; from Q_FREE on there is one for each consumer."""

# --- barriers ---------------------------------------------------------------------------------------------------------


@constexpr_function
def barrier_text(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def barrier(text: gl.constexpr, stage, WARPS: gl.constexpr):
    """PTX that every thread of the calling partition runs once, with the barrier of a stage in $1."""
    x = gl.full([WARPS * 32], FIRST_BARRIER + stage, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(text, "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(stage, GROUPS: gl.constexpr, WARPS: gl.constexpr = 4):
    """This partition, one warpgroup of GROUPS or all of them, has read a stage for the last time.

    To be called behind what uses the last loads of it: bar.arrive does not wait for loads in flight, and TMA, or another warp,
    would overwrite what they read.
    """
    barrier(barrier_text("arrive", GROUPS * 128 + 32), stage, WARPS)


@gluon.jit
def acquire(stage, GROUPS: gl.constexpr):
    """The producer waits until every consumer has released a stage."""
    barrier(barrier_text("sync", GROUPS * 128 + 32), stage, 1)


@gluon.jit
def everywhere(text: gl.constexpr):
    """PTX that every lane of a partition of one warp runs once."""
    x = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(text + " mov.u32 $0, $1;", "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1)


# --- numbers in shared memory -----------------------------------------------------------------------------------------


@gluon.jit
def allocate_numbers(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_number(numbers, index, x):
    """By a partition of one warp; to be followed by everywhere("bar.warp.sync ...")."""
    numbers.index(index).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + x)


@gluon.jit
def read_number(numbers, index, WARPS: gl.constexpr = 4):
    return gl.max(numbers.index(index).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


# --- tiles in registers and in shared memory --------------------------------------------------------------------------


@constexpr_function
def accumulator(width, warps=4):
    """The layout of wgmma's results [16 * warps, width], 64 rows to a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 16])


@gluon.jit
def matrix(tile):
    """A tile [1, rows, 1, columns] in shared memory, as TMA brings it, of two dimensions."""
    return tile.reshape([tile.shape[1], tile.shape[3]])


@gluon.jit
def here(x):
    """The integer x, of which the compiler knows nothing from here on.

    An address that depends on it is computed here, not far above, from where on it would lie in registers: the backward reloads 0
    registers in a step, not 5, and 0 in all, not 26 (Triton 3.6, heads of 128).
    """
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def column(x, LAYOUT: gl.constexpr):
    """x [64] against the rows of a matrix."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True), 1)


@constexpr_function
def accumulator_by_eights(rows, columns, warps=4):
    """The layout of wgmma's results [rows, columns] reshaped to [rows, columns / 8, 8].

    Which eights of a row a thread holds is known when compiled, so that it has an address for each of its rows, and constants; as
    [rows, columns] every element has an address of its own, in a pair of registers.
    """
    eights = [[0, 1 << bit, 0] for bit in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    of_warps = [[16 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 1], [8, 0, 0], *eights], lanes, of_warps, [], [rows, columns // 8, 8])


@gluon.jit
def by_eights(x, WARPS: gl.constexpr = 4):
    """wgmma's results [rows, columns] as [rows, columns / 8, 8], without moving a register."""
    LAYOUT: gl.constexpr = accumulator_by_eights(x.shape[0], x.shape[1], WARPS)
    return gl.convert_layout(x.reshape([x.shape[0], x.shape[1] // 8, 8]), LAYOUT, assert_trivial=True)


@gluon.jit
def rows_and_columns(ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr = 4):
    """The numbers of rows [rows, 1, 1] and columns [1, columns / 8, 8] of such a layout; int64 keeps constants apart."""
    LAYOUT: gl.constexpr = accumulator_by_eights(ROWS, COLUMNS, WARPS)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    of_eight = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    row = gl.expand_dims(gl.expand_dims(row, 1), 2)
    eight = gl.expand_dims(gl.expand_dims(eight, 0), 2)
    of_eight = gl.expand_dims(gl.expand_dims(of_eight, 0), 1)
    return row, 8 * eight.to(gl.int64) + of_eight


@constexpr_function
def rows_by_lines(width, warps=4):
    """A layout of [rows, width] of 16 bits in which a warp reads and writes whole lines of memory."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@constexpr_function
def packing_text(dtype, positive):
    return f"cvt.rn{'.relu' if positive else ''}.{'bf16' if dtype.is_bf16() else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def packed_half(p, DTYPE: gl.constexpr, POSITIVE: gl.constexpr = False):
    """float32 -> bf16 or fp16, two at a time: ``.to`` permutes bytes once more for every element. POSITIVE: 0 for negatives."""
    text: gl.constexpr = packing_text(DTYPE, POSITIVE)
    if DTYPE.is_bf16():
        half = gl.inline_asm_elementwise(text, "=r,r,r", [p], dtype=gl.bfloat16, is_pure=False, pack=2)
    else:
        half = gl.inline_asm_elementwise(text, "=r,r,r", [p], dtype=gl.float16, is_pure=False, pack=2)
    return half


# --- softcap ---------------------------------------------------------------------------------------------------------


@gluon.jit
def special_tanh(x):
    """By the special function unit: right to 1.2e-5, relatively (a test on GPUs), where 5e-4 are documented.

    By a polynomial and two special functions, as the portable kernels make it, the forward took twice its time.
    """
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


# --- dropout ----------------------------------------------------------------------------------------------------------


@constexpr_function
def counters_of_tile(width):
    """Of dropout's counters [32, width / 4] of 64 queries: a thread draws for just what it holds of an ``accumulator``."""
    keys = [[0, 4 << bit] for bit in range((width // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(keys, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, width // 4])


@constexpr_function
def counters_of_keys(width):
    """Of dropout's counters [32, width / 2] of 128 keys in 8 warps: a thread draws for itself and for a neighbour.

    An ``accumulator`` has key k in one lane and k + 1 in the one 4 further: the one draws for query q, the other for q + 1.
    """
    queries = [[0, 8 << bit] for bit in range((width // 16).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 1], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(queries, lanes, [[4, 0], [8, 0], [16, 0]], [], [32, width // 2])


EXCHANGE = gl.constexpr(
    "{ .reg .b32 other; shfl.sync.bfly.b32 other, $2, 4, 0x1f, 0xffffffff;"
    "  prmt.b32 $0, $2, other, $3; prmt.b32 $1, $2, other, $4; }"
)
"""Two words of the bytes of this lane's (0 to 3) and of that 4 lanes away (4 to 7), by the selectors of prmt."""


@gluon.jit
def kept_of_tile(stream, threshold, i, first, key, q_start, k_start, stride, WIDTH: gl.constexpr, ALIGNED: gl.constexpr):
    """bool [64, WIDTH] as ``triton_common.kept``, laid out as an accumulator; ``first``, ``key``: the first query and key."""
    LAYOUT: gl.constexpr = accumulator(WIDTH)
    if ALIGNED:
        COUNTERS: gl.constexpr = counters_of_tile(WIDTH)
        of_q = (q_start + stride * first) // 2 + gl.arange(0, 32, gl.SliceLayout(1, COUNTERS))
        of_k = (k_start + stride * key) // 4 + gl.arange(0, WIDTH // 4, gl.SliceLayout(0, COUNTERS))
        a, b = philox2x32(gl.expand_dims(of_q, 1), gl.expand_dims(of_k, 0), stream)
        keep = gl.join(quarters_kept(a, threshold), quarters_kept(b, threshold)).reshape([4, 8, WIDTH // 16, 4, 2, 2, 2])
        keep = gl.convert_layout(keep.permute([0, 6, 1, 2, 4, 3, 5]).reshape([64, WIDTH]), LAYOUT, assert_trivial=True)
    else:
        q_pos = q_start + stride * i
        k_pos = k_start + stride * (key + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)))
        keep = kept(stream, threshold, q_pos, k_pos, 0, 0, 64, WIDTH, False, False)
    return keep


@gluon.jit
def kept_of_keys(stream, threshold, query, key, q_start, k_start, stride, WIDTH: gl.constexpr, ALIGNED: gl.constexpr):
    """bool [128 keys, WIDTH queries] in 8 warps, the other way round; ``query``, ``key``: the first ones."""
    LAYOUT: gl.constexpr = accumulator(WIDTH, 8)
    if ALIGNED:
        COUNTERS: gl.constexpr = counters_of_keys(WIDTH)
        i = gl.arange(0, WIDTH // 2, gl.SliceLayout(0, COUNTERS))
        of_q = (q_start + stride * query) // 2 + i
        of_k = (k_start + stride * key) // 4 + gl.arange(0, 32, gl.SliceLayout(1, COUNTERS))
        a, b = philox2x32(gl.expand_dims(of_q, 0), gl.expand_dims(of_k, 1), stream)
        keep = gl.join(exchanged_kept(a, i % 2 == 0, threshold), exchanged_kept(b, i % 2 == 0, threshold))
        keep = keep.reshape([8, 4, WIDTH // 16, 4, 2, 2, 2, 2]).permute([0, 5, 1, 4, 2, 7, 3, 6]).reshape([128, WIDTH])
        keep = gl.convert_layout(keep, LAYOUT, assert_trivial=True)
    else:
        q_pos = q_start + stride * (query + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)))
        k_pos = k_start + stride * (key + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)))
        keep = kept(stream, threshold, q_pos, k_pos, 0, 0, WIDTH, 128, False, True)
    return keep


@gluon.jit
def exchanged_kept(word, even, threshold):
    """bool [..., 2, 2] for keys k and k + 8 of this lane, and queries q and q + 1, of words drawn by ``counters_of_keys``.

    The lane with an even key has the words of q and takes those of q + 1 from its neighbour, which has an odd key and turns both.
    """
    first, second = gl.where(even, 0x3210, 0x6547), gl.where(even, 0x7654, 0x2103)
    first, second = gl.inline_asm_elementwise(
        EXCHANGE,
        "=&r,=&r,r,r,r",
        [word, gl.expand_dims(first, 0), gl.expand_dims(second, 0)],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    return gl.join(halves_kept(first, threshold), halves_kept(second, threshold))
