"""Loads and products of tiles of q, k, v and dout, the key mask, and the zeroing of unused keys, in Triton.

    key_mask_BT[b, t]       +inf if the key mask leaves key t visible, else -inf: the upper bound of its scores
    key_mask_spans[b, n]    0 if the key mask leaves all keys 64 n .. 64 n + 63 visible, else 1; keys from T on are hidden

Shapes     a tile [rows, columns] of an array [batch, tokens, heads, columns]; key_mask_bits uint8 [B, ceil(T / 8)] -> key_mask_BT
           f32, key_mask_spans int32 [B, spans], in whole blocks of MASK_BLOCK keys
Program    of ``unpack_key_mask``: one (block of MASK_BLOCK keys, batch row)
Precision  products in the dtype of their factors, sums in f32
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import tile_sizes

SPAN = tl.constexpr(tile_sizes.MASK_SPAN)
SPANS = tl.constexpr(tile_sizes.MASK_BLOCK // tile_sizes.MASK_SPAN)


@triton.jit
def load_tile(
    source, batch, tokens, token, head, limit, columns: tl.constexpr, ROWS: tl.constexpr, LIMITED: tl.constexpr
):  # fmt: skip
    """Load a tile [ROWS, COLUMNS] of an array [batch, tokens, ...] from ``token`` on. Without TMA, padded columns are 0, and with
    LIMITED rows from ``limit`` on; with TMA those rows hold the array's next tokens, or 0 after its last token."""
    if columns.TMA:
        tile = source.load([batch, token, head, columns.COLUMN]).reshape([ROWS, columns.COLUMNS])
    else:
        row = tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, columns.COLUMNS)[None, :]
        offset = (batch.to(tl.int64) * tokens + token) * (columns.HEADS * columns.STRIDE) + head * columns.STRIDE + columns.COLUMN
        at = source + offset + row * (columns.HEADS * columns.STRIDE) + column
        if LIMITED:
            tile = tl.load(at, mask=(row < limit) & (column < columns.WIDTH), other=0.0)
        elif columns.WIDTH < columns.COLUMNS:
            tile = tl.load(at, mask=column < columns.WIDTH, other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def load_own_tile(source, batch, tokens, token, head, limit, columns: tl.constexpr, ROWS: tl.constexpr):
    """Load a tile that a program uses in every iteration of its loop. Triton (3.6, 3.7) leaves it in shared memory only if its
    descriptor has two dimensions; otherwise it would take 32 registers of each thread, and the loops would spill. Rows from
    ``limit`` on may hold tokens of the next batch row."""
    if columns.TMA:
        tile = source.load([batch * tokens + token, head * columns.STRIDE + columns.COLUMN])
    else:
        tile = load_tile(source, batch, tokens, token, head, limit, columns, ROWS, True)
    return tile


@triton.jit
def add_product(total, a, b, tokens, PRECISION: tl.constexpr):
    """Return total + a b, in float32 with a b summed apart, because one long chain of additions loses half a digit. The condition
    ``tokens > 0`` is always true, but keeps the compiler from joining both sums."""
    if a.dtype == tl.float32:
        total += tl.where(tokens > 0, tl.dot(a, b, input_precision=PRECISION), 0.0)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def keep_seen(tile, visible, BY_BITS: tl.constexpr):
    """Return a k or v tile with 0 in keys that no query sees, because 0 times NaN is NaN. ``visible``: bool [queries, keys].
    BY_BITS avoids a tensor of bools, for which Triton 3.9 finds no layout before a product on GPUs older than Hopper."""
    some = tl.max(visible.to(tl.int32), 0)[:, None]
    if BY_BITS:
        INTEGER: tl.constexpr = tl.int32 if tile.dtype == tl.float32 else tl.int16  # pyright: ignore[reportAssignmentType]
        kept_bits = tile.to(INTEGER, bitcast=True) & (-some).to(INTEGER)
        kept_tile = kept_bits.to(tile.dtype, bitcast=True)
    else:
        kept_tile = tl.where(some > 0, tile, 0.0)
    return kept_tile


@triton.jit
def unpack_key_mask(key_mask_bits_ptr, key_mask_BT, key_mask_spans_ptr, T, BLOCK_K: tl.constexpr):
    """Unpack the key mask to upper bounds of scores, and flag spans with hidden keys. Key j is bit j % 8 of byte j // 8. A
    minimum with a bound takes one instruction and turns a hidden key's NaN into -inf; testing bits made the forward slower by
    half."""
    tiles = tl.cdiv(T, BLOCK_K)
    tile = tl.program_id(0) % tiles
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    j = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    byte = tl.load(key_mask_bits_ptr + batch * ((T + 7) // 8) + j // 8, mask=j < T, other=0)
    seen = (byte.to(tl.int32) >> (j % 8)) & 1
    tl.store(key_mask_BT + batch * T + j, tl.where(seen != 0, float("inf"), float("-inf")), mask=j < T)
    spans: tl.constexpr = BLOCK_K // SPAN
    hidden = 1 - tl.min(tl.reshape(seen, [spans, SPAN]), 1)
    tl.store(key_mask_spans_ptr + (batch * tiles + tile) * spans + tl.arange(0, spans), hidden)


@triton.jit
def some_hidden(key_mask_spans_ptr, batch, T, token, BLOCK_K: tl.constexpr):
    """Return whether a span that overlaps a shard's keys ``token .. token + BLOCK_K - 1`` has a key hidden by the key mask."""
    at = key_mask_spans_ptr + batch * (tl.cdiv(T, SPAN * SPANS) * SPANS)
    last = (token + BLOCK_K - 1) // SPAN
    hidden = tl.load(at + token // SPAN)
    for n in tl.static_range(1, (BLOCK_K + SPAN - 2) // SPAN + 1):  # a run may begin anywhere, so 16 keys may lie in two spans
        hidden |= tl.load(at + tl.minimum(token // SPAN + n, last))
    return hidden != 0


@triton.jit
def under_key_mask(s, key_mask_BT, batch, T, k_base, j, k_len):
    """Return the scores [queries, keys] with -inf for keys hidden by the key mask, even if a score is NaN."""
    most = tl.load(key_mask_BT + batch.to(tl.int64) * T + k_base + j, mask=j < k_len, other=float("-inf"))
    return tl.minimum(s, most[None, :])
