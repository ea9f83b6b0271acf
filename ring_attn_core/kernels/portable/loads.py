"""Tiles of an array: loaded, multiplied, and cleaned of what nobody may see."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    source,
    batch,
    tokens,
    token,
    head,
    limit,
    HEADS: tl.constexpr,
    STRIDE: tl.constexpr,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LIMITED: tl.constexpr,
    TMA: tl.constexpr,
):
    """[ROWS, COLUMNS] of an array [batch, tokens, HEADS, STRIDE]: tokens from ``token`` on, WIDTH columns from COLUMN on.

    Beyond WIDTH stands 0, and under LIMITED from row ``limit`` on. By TMA ``source`` is a descriptor, WIDTH is COLUMNS, and
    behind the limit stands what follows in the array, or 0.
    """
    if TMA:
        tile = source.load([batch, token, head, COLUMN]).reshape([ROWS, COLUMNS])
    else:
        row = tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        offset = (batch.to(tl.int64) * tokens + token) * (HEADS * STRIDE) + head * STRIDE + COLUMN
        at = source + offset + row * (HEADS * STRIDE) + column
        if LIMITED:
            tile = tl.load(at, mask=(row < limit) & (column < WIDTH), other=0.0)
        elif WIDTH < COLUMNS:
            tile = tl.load(at, mask=column < WIDTH, other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def load_own_tile(
    source,
    batch,
    tokens,
    token,
    head,
    limit,
    HEADS: tl.constexpr,
    STRIDE: tl.constexpr,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """The tile that a program works on all the while, as ``load_tile`` gives it. By TMA from an array [batch * tokens, columns].

    Of two dimensions, since only then Triton (3.6, 3.7) leaves it in shared memory, where a product can read it: with the 32
    registers a thread that it takes else, the loops spill. Rows behind the limit may hold the next batch row's tokens.
    """
    if TMA:
        tile = source.load([batch * tokens + token, head * STRIDE + COLUMN])
    else:
        tile = load_tile(source, batch, tokens, token, head, limit, HEADS, STRIDE, COLUMN, WIDTH, ROWS, COLUMNS, True, False)
    return tile


@triton.jit
def add_product(total, a, b, tokens, PRECISION: tl.constexpr):
    """total + a b. In float32 the product is summed by itself first: one long chain of additions would lose half a digit.

    The condition, true wherever there is a tile, keeps the compiler from making one chain of it again.
    """
    if a.dtype == tl.float32:
        total += tl.where(tokens > 0, tl.dot(a, b, input_precision=PRECISION), 0.0)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def keep_seen(tile, visible, BY_BITS: tl.constexpr):
    """A tile of keys or values, 0 where no query sees the key by ``visible`` [queries, keys]: 0 times NaN would be NaN.

    BY_BITS: without a tensor of truth values, which Triton 3.9 fails to lay out for the products of GPUs before Hopper.
    """
    some = tl.max(visible.to(tl.int32), 0)[:, None]
    if BY_BITS:
        INTEGER: tl.constexpr = tl.int32 if tile.dtype == tl.float32 else tl.int16  # pyright: ignore[reportAssignmentType]
        kept_bits = tile.to(INTEGER, bitcast=True) & (-some).to(INTEGER)
        kept_tile = kept_bits.to(tile.dtype, bitcast=True)
    else:
        kept_tile = tl.where(some > 0, tile, 0.0)
    return kept_tile


@triton.jit
def key_ceiling(bits_ptr, ceiling_BT, hidden_ptr, T, BLOCK_K: tl.constexpr):
    """The key mask as the most that a score may be, inf or -inf, and which spans of 64 keys have hidden ones, 1 or 0.

    Bit j % 8 of byte j // 8 says whether key j may be attended. Unpacked before each launch: a minimum is one instruction a
    score, and -inf for NaN too; testing bits cost the forward half as much again.
    """
    tiles = tl.cdiv(T, BLOCK_K)
    tile = tl.program_id(0) % tiles
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    j = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    byte = tl.load(bits_ptr + batch * ((T + 7) // 8) + j // 8, mask=j < T, other=0)
    seen = (byte.to(tl.int32) >> (j % 8)) & 1
    tl.store(ceiling_BT + batch * T + j, tl.where(seen != 0, float("inf"), float("-inf")), mask=j < T)
    spans: tl.constexpr = BLOCK_K // 64
    hidden = 1 - tl.min(tl.reshape(seen, [spans, 64]), 1)
    tl.store(hidden_ptr + (batch * tiles + tile) * spans + tl.arange(0, spans), hidden)


@triton.jit
def some_hidden(hidden_ptr, batch, T, key, BLOCK_K: tl.constexpr, SPANS: tl.constexpr):
    """Whether the key mask may hide one of the keys key .. key + BLOCK_K - 1 of a shard; SPANS: of one program of key_ceiling."""
    at = hidden_ptr + batch * (tl.cdiv(T, 64 * SPANS) * SPANS)
    last = (key + BLOCK_K - 1) // 64
    hidden = tl.load(at + key // 64)
    for n in tl.static_range(1, (BLOCK_K + 62) // 64 + 1):  # a run may begin anywhere, so even 16 keys may lie in two spans
        hidden |= tl.load(at + tl.minimum(key // 64 + n, last))
    return hidden != 0


@triton.jit
def under_ceiling(s, ceiling_BT, batch, T, key, j, k_len):
    """Scores [queries, keys] -> -inf where the key mask hides a key, whatever the score is."""
    ceiling = tl.load(ceiling_BT + batch.to(tl.int64) * T + key + j, mask=j < k_len, other=float("-inf"))
    return tl.minimum(s, ceiling[None, :])
