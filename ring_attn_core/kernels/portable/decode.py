"""Attention of a few queries over a cache that is cut into splits, and the merge of the splits, in Triton (sm_80 and later).

    s_ij  = softcap tanh(scale q_i . k_j / softcap) - slope (q_pos - k_pos)   if query i sees the token in slot j, else -inf
    lse_i = log sum_j exp(s_ij)           natural log; -inf if the query sees no token
    out_i = sum_j exp(s_ij - lse_i) v_j   0 if the query sees no token

One query is one row of work per head. Without splits, a GPU would read a long cache with only a few programs. Therefore the
slots are cut into splits, each with its own programs (Flash-Decoding, Dao et al. 2023). A tile has one row for each query and
each query head of a kv head, so k and v are read once. More than 64 rows (32 in float32) take several tiles, and every tile
reads k and v. ``merge_pairs`` then merges the splits, or the results of ranks, in a fixed order: two runs give the same bits.

The position of a slot, loaded before k and v, decides its visibility. The program loads k and v only from slots that a query of
the tile may see, because an empty slot (position -1) may hold NaN. It skips unseen slots at both ends of a split, SCAN at once.

Shapes     q_BNHD, k_BTGD, v_BTGE, q_positions int32 [B, N], k_positions int32 [B, T], tree_mask uint8 [B, N, N], depths int32
           [B, N] (the position of each node of a tree in the sequence that it continues), alibi_slopes f32 [H], k_scale,
           v_scale f32 [G] -> pairs f32 [SPLITS, B, N, H, E + 1], the last column the lse
           B batch, N queries, T slots, H/G query/key heads (G divides H), D/E head dim of q, k / of v
Program    ``decode``: one (kv head, tile of rows, split, batch row), kv heads fastest, so that programs that read neighbouring
           memory run together. Row m of a kv head is query m // (H / G) with query head m % (H / G) of that kv head.
           ``merge_pairs``: one row of [B, N, H]
Precision  products in q's dtype, sums and softmax in f32, in base 2. One-byte keys and values become float16, which holds them
           exactly; from sm_89 on, this conversion takes one instruction (to bfloat16, four). With one-byte keys, queries in
           bfloat16 become float16 too, each row divided by a power of two. k_scale multiplies the scores, v_scale the sums.
           Probabilities in float16 are multiplied by LIFT, because otherwise the many small ones of a long cache would become 0
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .loads import add_product
from .scores import LN2, LOG2E, tanh

LIFT = tl.constexpr(2.0**15)
"""Factor of probabilities in float16, so that probabilities down to 2^-39 do not become 0."""
LOWER = tl.constexpr(2.0**-15)


class DecodeConstants(NamedTuple):
    """The constants of ``decode`` that its helpers read. SCAN: slots that ``skip_unseen`` tests at once. FP8: 0 if k and v are
    not float8; 1: converted by an instruction; 2: by bit operations (GPUs before sm_89)."""

    G: Any
    BLOCK_K: Any
    SCAN: Any
    FP8: Any


class RowVisibility(NamedTuple):
    """The cache slots that a program's rows may see: positions ``lowest`` to ``highest``, limited by window and tree mask. Node n
    of a draft tree is cached at position ``first`` + n, but ``q_position`` and ``depths`` hold ``first`` + depth."""

    q_position: Any
    lowest: Any
    highest: Any
    first: Any
    tree_rows: Any
    depths: Any
    window: Any
    N: Any


@triton.jit
def decode(
    q_BNHD,
    k_BTGD,
    v_BTGE,
    q_positions_BN,
    k_positions_BT,
    tree_mask_BNN,
    depths_BN,
    alibi_slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    pairs_SBNHE,
    inner,
    softcap,
    window,
    N,
    T,
    B,
    SPLITS,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SCAN: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sizes: tl.constexpr = DecodeConstants(G, BLOCK_K, SCAN, FP8)
    R: tl.constexpr = H // G
    ACCURATE: tl.constexpr = q_BNHD.dtype.element_ty == tl.float32
    row_tiles = tl.cdiv(R * N, BLOCK_M)
    program = tl.program_id(0)
    group = program % G
    m0 = program // G % row_tiles * BLOCK_M
    split = program // (G * row_tiles) % SPLITS
    batch = (program // (G * row_tiles) // SPLITS).to(tl.int64)

    m = m0 + tl.arange(0, BLOCK_M)
    valid = m < R * N
    query = m // R
    head = group * R + m % R
    row = (batch * N + query) * H + head
    d = tl.arange(0, BLOCK_D)
    q_tile = tl.load(q_BNHD + row[:, None] * D + d[None, :], mask=valid[:, None] & (d[None, :] < D), other=0.0)
    slopes = None if alibi_slopes_ptr is None else tl.load(alibi_slopes_ptr + head, mask=valid, other=0.0)
    factor = inner
    if k_scale_ptr is not None:
        factor = inner * tl.load(k_scale_ptr + group)
    if FP8 and q_tile.dtype == tl.bfloat16:
        q_tile, power = in_half(q_tile)
        factor = (factor * power)[:, None]
    HALF: tl.constexpr = q_tile.dtype == tl.float16

    slot_of_query = tl.load(q_positions_BN + batch * N + query, mask=valid, other=-1)
    if tree_mask_BNN is None:
        q_position = slot_of_query
        first_node = 0
        highest = tl.max(q_position)
        tree_rows = None
        depths = None
    else:
        q_position = tl.load(depths_BN + batch * N + query, mask=valid, other=-1)
        first_node = tl.load(q_positions_BN + batch * N)
        highest = first_node + N - 1
        tree_rows = tree_mask_BNN + (batch * N + query) * N
        depths = depths_BN + batch * N
    lowest = 0
    if window is not None:  # a padded query has position -1, which can only lower ``lowest``
        lowest = tl.maximum(tl.min(tl.where(valid, q_position, 2147483647)) - window, 0)
    seen = RowVisibility(q_position, lowest, highest, first_node, tree_rows, depths, window, N)
    positions = k_positions_BT + batch * T

    slots = tl.cdiv(tl.cdiv(T, BLOCK_K), SPLITS) * BLOCK_K
    first = tl.minimum(split * slots, T)
    last = tl.minimum(first + slots, T)
    first = skip_unseen(positions, first, last, seen, True, sizes)
    last = skip_unseen(positions, first, last, seen, False, sizes)

    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for n0 in range(first, last, BLOCK_K):
        j = n0 + tl.arange(0, BLOCK_K)
        position = tl.load(positions + j, mask=j < last, other=-1)
        read = (position >= lowest) & (position <= highest)
        k_tile = load_slots(k_BTGD, batch * T + n0, group, read, D, BLOCK_D, sizes).to(q_tile.dtype)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * factor
        if softcap is not None:
            s = tanh(s, ACCURATE) * softcap
        visible, lag = who_sees_whom(position, read, valid, seen)
        if slopes is not None:
            s -= (slopes * LOG2E)[:, None] * lag.to(tl.float32)
        s = tl.where(visible, s, float("-inf"))
        greater = tl.maximum(most, tl.max(s, 1))
        shift = tl.where(greater == float("-inf"), 0.0, greater)
        p = tl.exp2(s - shift[:, None])
        decay = tl.exp2(most - shift)
        l = l * decay + tl.sum(p, 1)
        v_tile = load_slots(v_BTGE, batch * T + n0, group, read, E, BLOCK_E, sizes).to(q_tile.dtype)
        if HALF:
            p *= LIFT
        acc = add_product(acc * decay[:, None], p.to(q_tile.dtype), v_tile, T, PRECISION)
        most = greater

    if HALF:
        acc *= LOWER
    something = tl.where(l > 0, l, 1.0)
    acc = acc / something[:, None]
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + group)
    lse = tl.where(l > 0, most * LN2 + tl.log(something), float("-inf"))
    e = tl.arange(0, BLOCK_E)
    at = (split.to(tl.int64) * B * N * H + row) * (E + 1)
    tl.store(pairs_SBNHE + at[:, None] + e[None, :], acc, mask=valid[:, None] & (e[None, :] < E))
    tl.store(pairs_SBNHE + at + E, lse, mask=valid)


@triton.jit
def load_slots(source, slot, group, read, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, sizes: tl.constexpr):
    """Load a tile [BLOCK_K, COLUMNS] of k or v, with 0 outside the mask ``read``. ``slot``: batch row * T + first slot."""
    j = tl.arange(0, sizes.BLOCK_K)
    column = tl.arange(0, COLUMNS)
    at = source + (slot * sizes.G + group) * WIDTH + j[:, None] * (sizes.G * WIDTH) + column[None, :]
    if WIDTH < COLUMNS:
        tile = tl.load(at, mask=read[:, None] & (column[None, :] < WIDTH), other=0)
    else:
        tile = tl.load(at, mask=read[:, None], other=0)
    if sizes.FP8 == 1:
        tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif sizes.FP8 == 2:
        tile = from_bits(tile)
    return tile


@triton.jit
def in_half(q_tile):
    """Divide each row by a power of two, so that its largest magnitude lies between 1 and 2. Return the tile in float16 and the
    powers, 2^-120 .. 2^120, in f32; rows of zeros stay 0."""
    wide = q_tile.to(tl.float32)
    exponent = tl.max(wide.to(tl.int32, bitcast=True) & 0x7F800000, 1)  # of the largest |q|, clamped next for 0 and inf
    exponent = tl.minimum(tl.maximum(exponent, 7 << 23), 247 << 23)  # 2^-120 to 2^120: both have an inverse
    inverse = (254 << 23) - exponent
    return (wide * inverse.to(tl.float32, bitcast=True)[:, None]).to(tl.float16), exponent.to(tl.float32, bitcast=True)


@triton.jit
def from_bits(tile):
    """Convert float8_e4m3fn bytes to float16 by bit operations; the exponent bias is larger by 8, hence the factor of 2^8."""
    bits = tile.to(tl.int16)
    moved = ((bits & 128) << 8) | ((bits & 127) << 7)
    return tl.where((bits & 127) == 127, float("nan"), moved.to(tl.float16, bitcast=True) * 256.0)


@triton.jit
def who_sees_whom(position, read, valid, seen):
    """Return the visibility mask, bool [BLOCK_M, BLOCK_K], and the int32 lags q_pos - k_pos, of tree nodes by ``seen.depths``."""
    if seen.tree_rows is None:
        lag = seen.q_position[:, None] - position[None, :]
        visible = read[None, :] & (lag >= 0)
    else:
        node = position - seen.first
        inside = read & (node >= 0)
        stands = tl.where(inside, tl.load(seen.depths + node, mask=inside, other=0), position)
        lag = seen.q_position[:, None] - stands[None, :]
        among = tl.load(seen.tree_rows[:, None] + node[None, :], mask=valid[:, None] & inside[None, :], other=0) != 0
        visible = (read & (node < 0))[None, :] | among
    if seen.window is not None:
        visible = visible & (lag <= seen.window)
    return visible, lag


@triton.jit
def skip_unseen(positions, first, last, seen, FORWARD: tl.constexpr, sizes: tl.constexpr):
    """Return ``first`` moved up past slots that no row may see, or ``last`` moved down unless FORWARD, by SCAN slots at once."""
    at = first if FORWARD else last
    unseen = first < last
    while unseen:
        n0 = at if FORWARD else tl.maximum(at - sizes.SCAN, first)
        j = n0 + tl.arange(0, sizes.SCAN)
        end = tl.minimum(n0 + sizes.SCAN, last) if FORWARD else at
        position = tl.load(positions + j, mask=j < end, other=-1)
        unseen = tl.max(((position >= seen.lowest) & (position <= seen.highest)).to(tl.int32)) == 0
        if unseen:
            at = end if FORWARD else n0
            unseen = at < last if FORWARD else first < at
    return at


@triton.jit
def merge_pairs(
    pairs_SRE,
    sinks_ptr,
    merged_RE,
    out_RE,
    lse_R,
    S,
    ROWS,
    H: tl.constexpr,
    E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Merge S pairs (out, lse) of one (batch row, query, head), and a sink if passed, by the weights exp(lse)."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    e = tl.arange(0, BLOCK_E)
    pairs = pairs_SRE + row * (E + 1)
    top = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for s0 in range(0, S, BLOCK_S):
        base = (s0 + s).to(tl.int64) * ROWS * (E + 1)
        lse = tl.load(pairs + base + E, mask=s0 + s < S, other=float("-inf"))
        top = tl.maximum(top, lse)
    most = tl.max(top, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % H)
        most = tl.maximum(most, sink)
    shift = tl.where(most == float("-inf"), 0.0, most)
    total = 0.0
    acc = tl.zeros([BLOCK_E], tl.float32)
    for s0 in range(0, S, BLOCK_S):
        inside = s0 + s < S
        base = (s0 + s).to(tl.int64) * ROWS * (E + 1)
        weight = tl.exp(tl.load(pairs + base + E, mask=inside, other=float("-inf")) - shift)
        out = tl.load(pairs + base[:, None] + e[None, :], mask=inside[:, None] & (e[None, :] < E), other=0.0)
        total += tl.sum(weight, 0)
        acc += tl.sum(weight[:, None] * out, 0)
    if sinks_ptr is not None:
        total += tl.exp(sink - shift)
    something = tl.where(total > 0, total, 1.0)
    acc = acc / something
    lse = tl.where(total > 0, shift + tl.log(something), float("-inf"))
    if merged_RE is not None:
        tl.store(merged_RE + row * (E + 1) + e, acc, mask=e < E)
        tl.store(merged_RE + row * (E + 1) + E, lse)
    else:
        tl.store(out_RE + row * E + e, acc.to(out_RE.dtype.element_ty), mask=e < E)
        tl.store(lse_R + row, lse)
