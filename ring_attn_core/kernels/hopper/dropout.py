"""The dropout mask in the register layouts of wgmma's accumulators, in Gluon.

    keep_mask_of_tile     the mask of portable.dropout.keep_mask, in the layout of the forward's scores [queries, keys]
    keep_mask_of_keys     the same mask, in the layout of the backward's scores [keys, queries]

In ``keep_mask_of_tile`` a thread computes the random words of the elements that it holds. In ``keep_mask_of_keys``, if ALIGNED,
two lanes share this work: each computes half of the words for the elements of both, and then they exchange words.

Shapes     bool [64 queries, WIDTH keys] in 4 warps; bool [KEYS, WIDTH queries], 16 keys to a warp
Units      positions are token positions of the global sequence
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.dropout import keep_halves, keep_mask, keep_quarters, philox2x32
from .gluon import constexpr_function
from .register_layouts import accumulator


@constexpr_function
def counters_of_tile(width):
    """Return the layout of the Philox counters [32, width / 4] of a tile [64 queries, ``width`` keys]. A counter serves two
    queries and four keys, which its thread holds in an ``accumulator``."""
    keys = [[0, 4 << bit] for bit in range((width // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(keys, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, width // 4])


@constexpr_function
def counters_of_keys(width, keys):
    """Return the layout of the Philox counters [keys / 4, width / 2] of a tile [keys, ``width`` queries], 16 keys to a warp. Lane
    l computes the words of query q for keys k and k + 1, lane l + 4 those of query q + 1; then they exchange words."""
    queries = [[0, 8 << bit] for bit in range((width // 16).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 1], [1, 0], [2, 0]]
    warps = [[4 << bit, 0] for bit in range((keys // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(queries, lanes, warps, [], [keys // 4, width // 2])


EXCHANGE = gl.constexpr(
    "{ .reg .b32 other; shfl.sync.bfly.b32 other, $2, 4, 0x1f, 0xffffffff;"
    "  prmt.b32 $0, $2, other, $3; prmt.b32 $1, $2, other, $4; }"
)
"""PTX that exchanges a word with the lane 4 away, and builds two words from the bytes of both lanes.

The selectors of prmt are 0 to 3 for this lane's bytes, and 4 to 7 for the other lane's.
"""


@gluon.jit
def keep_mask_of_tile(stream, threshold, i, m0, n0, q_start, k_start, stride, WIDTH: gl.constexpr, ALIGNED: gl.constexpr):
    """Return the dropout mask, bool [64, WIDTH keys], of queries ``i`` and keys from ``n0`` on; True keeps a probability."""
    LAYOUT: gl.constexpr = accumulator(WIDTH)
    if ALIGNED:
        COUNTERS: gl.constexpr = counters_of_tile(WIDTH)
        q_place = (q_start + stride * m0) // 2 + gl.arange(0, 32, gl.SliceLayout(1, COUNTERS))
        k_place = (k_start + stride * n0) // 4 + gl.arange(0, WIDTH // 4, gl.SliceLayout(0, COUNTERS))
        a, b = philox2x32(gl.expand_dims(q_place, 1), gl.expand_dims(k_place, 0), stream)
        keep = gl.join(keep_quarters(a, threshold), keep_quarters(b, threshold)).reshape([4, 8, WIDTH // 16, 4, 2, 2, 2])
        keep = gl.convert_layout(keep.permute([0, 6, 1, 2, 4, 3, 5]).reshape([64, WIDTH]), LAYOUT, assert_trivial=True)
    else:
        q_pos = q_start + stride * i
        k_pos = k_start + stride * (n0 + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)))
        keep = keep_mask(stream, threshold, q_pos, k_pos, 0, 0, 64, WIDTH, False, False)
    return keep


@gluon.jit
def keep_mask_of_keys(
    stream, threshold, m0, n0, q_start, k_start, stride, KEYS: gl.constexpr, WIDTH: gl.constexpr, ALIGNED: gl.constexpr
):  # fmt: skip
    """Return the dropout mask, bool [KEYS, WIDTH queries]; True keeps a probability. ``stream``: the Philox key. ``m0``, ``n0``:
    local indices of the first query and key. ALIGNED: runs have stride 1 and start at multiples of 16, so one Philox serves
    eight."""
    LAYOUT: gl.constexpr = accumulator(WIDTH, KEYS // 16)
    if ALIGNED:
        COUNTERS: gl.constexpr = counters_of_keys(WIDTH, KEYS)
        i = gl.arange(0, WIDTH // 2, gl.SliceLayout(0, COUNTERS))
        q_place = (q_start + stride * m0) // 2 + i
        k_place = (k_start + stride * n0) // 4 + gl.arange(0, KEYS // 4, gl.SliceLayout(1, COUNTERS))
        a, b = philox2x32(gl.expand_dims(q_place, 0), gl.expand_dims(k_place, 1), stream)
        keep = gl.join(keep_exchanged(a, i % 2 == 0, threshold), keep_exchanged(b, i % 2 == 0, threshold))
        keep = keep.reshape([KEYS // 16, 4, WIDTH // 16, 4, 2, 2, 2, 2]).permute([0, 5, 1, 4, 2, 7, 3, 6]).reshape([KEYS, WIDTH])
        keep = gl.convert_layout(keep, LAYOUT, assert_trivial=True)
    else:
        q_pos = q_start + stride * (m0 + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)))
        k_pos = k_start + stride * (n0 + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT)))
        keep = keep_mask(stream, threshold, q_pos, k_pos, 0, 0, WIDTH, KEYS, False, True)
    return keep


@gluon.jit
def keep_exchanged(word, even, threshold):
    """Exchange words between two lanes and return the mask, bool [..., 2, 2], of keys k, k + 8 and queries q, q + 1. Lanes with
    even keys pass the words of query q, those with odd keys the words of q + 1. The latter rotate both words to the left by one
    byte (portable/dropout.py)."""
    first, second = gl.where(even, 0x3210, 0x6547), gl.where(even, 0x7654, 0x2103)
    first, second = gl.inline_asm_elementwise(
        EXCHANGE,
        "=&r,=&r,r,r,r",
        [word, gl.expand_dims(first, 0), gl.expand_dims(second, 0)],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    return gl.join(keep_halves(first, threshold), keep_halves(second, threshold))
