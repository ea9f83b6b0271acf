"""What the Triton kernels share: a run pair's row, the keys a query sees, tiles of an array, scores, dropout.

Index tensors come broadcast, ``i`` of queries and ``j`` of keys against each other, so that every function here serves tiles of
scores in either orientation, [queries, keys] and [keys, queries].
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import struct

import triton
import triton.language as tl

from .. import dropout

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]

ROW_FIELDS = tl.constexpr(10)
NOTHING_BEGINS = tl.constexpr(2**30)
LOG2E = tl.constexpr(1.4426950408889634)
ROUNDS = tl.constexpr(dropout.ROUNDS)
MULTIPLIER = tl.constexpr(dropout.MULTIPLIER_OF_2)
WEYL = tl.constexpr(dropout.WEYL[0])


@triton.jit
def load_row(rows_ptr, pair):
    """lo, hi, q_base, q_len, q_start, k_base, k_len, k_start, stride of a pair of runs: the fields of ``runs.Row``."""
    at = rows_ptr + pair * ROW_FIELDS
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
        tl.load(at + 8),
    )


@triton.jit
def keys_seen(i, extents_ptr, batch, q_tokens, lo, hi, q_base, q_len, k_len, k_start, stride):
    """begin, end of the keys j of a run that each query i of a run sees: band, extent and length make one interval.

    begin = max(0, i - hi, ceil((first - k_start) / stride)); end = min(k_len, i - lo + 1, ceil((end - k_start) / stride)).
    A query that sees nothing, or is padding, has begin >= end.
    """
    begin = tl.maximum(i - hi, 0)
    end = tl.minimum(i - lo + 1, k_len)
    if extents_ptr is not None:
        at = extents_ptr + (batch.to(tl.int64) * q_tokens + q_base + i) * 2
        first = tl.load(at, mask=i < q_len, other=0)
        last = tl.load(at + 1, mask=i < q_len, other=0)
        begin = tl.maximum(begin, (tl.maximum(first - k_start, 0) + stride - 1) // stride)
        end = tl.minimum(end, (tl.maximum(last - k_start, 0) + stride - 1) // stride)
    nothing = (i >= q_len) | (begin >= end)
    return tl.where(nothing, NOTHING_BEGINS, begin), tl.where(nothing, 0, end)


@triton.jit
def tiles_in_band(x0, x1, lo, hi, others, BLOCK: tl.constexpr):
    """Tiles of y in 0 .. others - 1 that x0 .. x1 - 1 meet by lo <= x - y <= hi: first, last, whole_first, whole_last.

    Ends are exclusive. The whole ones are those of which every x meets every y. x are queries and y keys, or with (-hi, -lo) the
    other way round.
    """
    some = (x0 < x1) & (lo <= hi)
    first = tl.maximum(x0 - hi, 0) // BLOCK
    last = (tl.minimum(x1 - lo, others) + BLOCK - 1) // BLOCK
    whole_first = (tl.maximum(x1 - 1 - hi, 0) + BLOCK - 1) // BLOCK
    whole_last = tl.minimum(x0 - lo + 1, others) // BLOCK
    return in_order(first, tl.where(some, last, first), whole_first, whole_last)


@triton.jit
def tiles_in_extents(first, last, whole_first, whole_last, begin, end, valid, BLOCK: tl.constexpr):
    """The part of such a range of key tiles that the intervals of a tile of queries meet, and that all of them cover."""
    first = tl.maximum(first, tl.min(begin, 0) // BLOCK)
    last = tl.minimum(last, (tl.max(end, 0) + BLOCK - 1) // BLOCK)
    whole_first = tl.maximum(whole_first, (tl.max(tl.where(valid, begin, 0), 0) + BLOCK - 1) // BLOCK)
    whole_last = tl.minimum(whole_last, tl.min(tl.where(valid, end, NOTHING_BEGINS), 0) // BLOCK)
    return in_order(first, last, whole_first, whole_last)


@triton.jit
def in_order(first, last, whole_first, whole_last):
    """The same with first <= whole_first <= whole_last <= last."""
    last = tl.maximum(last, first)
    whole_first = tl.minimum(tl.maximum(whole_first, first), last)
    whole_last = tl.minimum(tl.maximum(whole_last, whole_first), last)
    return first, last, whole_first, whole_last


@triton.jit
def partly_seen(t, first, whole_first, whole_last):
    """The t-th tile of those that need a mask: the ones before the whole tiles, then the ones behind them."""
    before = whole_first - first
    return tl.where(t < before, first + t, whole_last + t - before)


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


@triton.jit
def tanh(x, ACCURATE: tl.constexpr):
    """Accurate to 1e-7 absolutely; ACCURATE to a rounding, near 0 too.

    Special functions are made 16 a cycle. So eight scores of at most 0.625, which is how a softcap is used, go through a
    polynomial, and only else through an exponential and a reciprocal.
    """
    if ACCURATE:
        e = tl.exp2(tl.abs(x) * -2.8853900817779268)
        t = (1.0 - e) / (1.0 + e)
        square = x * x
        series = 1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * (-0.0539682540 + square * 0.0218694885)))
        t = tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -t, t))
    elif INTERPRETED:
        t = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
    else:
        t = tl.inline_asm_elementwise(TANH_OF_8, TANH_REGISTERS, [x], dtype=tl.float32, is_pure=True, pack=8)  # pyright: ignore[reportArgumentType]
    return t


def _tanh_of_8() -> str:
    """PTX of eight tanh, $8 to $15 -> $0 to $7. The polynomial: of least error within 0.625, 3.1e-8."""
    each = lambda *lines: [line.format(y=f"y{n}", x=f"${8 + n}", to=f"${n}") for n in range(8) for line in lines]
    hexadecimal = lambda x: "0f" + struct.pack(">f", x).hex()
    c0, c1, c2, c3, c4 = map(hexadecimal, (0.99999946, -0.33330483, 0.13291034, -0.05136296, 0.01453019))
    return "\n".join([
        "{ .reg .pred p; .reg .f32 m, a, " + ", ".join(f"y{n}" for n in range(8)) + ";",
        f"mov.f32 m, {hexadecimal(0.0)};",
        *each("abs.f32 a, {x}; max.f32 m, m, a;"),
        f"setp.gtu.f32 p, m, {hexadecimal(0.625)}; @p bra far;",
        *each("mul.ftz.f32 {y}, {x}, {x};"),
        *each(f"fma.rn.ftz.f32 a, {{y}}, {c4}, {c3}; fma.rn.ftz.f32 a, a, {{y}}, {c2};"
              f" fma.rn.ftz.f32 a, a, {{y}}, {c1}; fma.rn.ftz.f32 a, a, {{y}}, {c0}; mul.ftz.f32 {{to}}, a, {{x}};"),
        "bra done; far:",
        *each(f"mul.ftz.f32 a, {{x}}, {hexadecimal(2.8853900817779268)}; ex2.approx.ftz.f32 a, a;"
              f" add.ftz.f32 a, a, {hexadecimal(1.0)}; rcp.approx.ftz.f32 a, a;"
              f" fma.rn.ftz.f32 {{to}}, a, {hexadecimal(-2.0)}, {hexadecimal(1.0)};"),
        "done: }",
    ])  # fmt: skip


TANH_OF_8 = tl.constexpr(_tanh_of_8())
TANH_REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))


@triton.jit
def scores(products, i, j, slope, inner, cap, q_start, k_start, stride, ACCURATE: tl.constexpr):
    """(scores in base 2, the tanh in them or without softcap the scores again) of products q . k.

    ``inner`` is scale log2(e), or under softcap scale / softcap with ``cap`` softcap log2(e): rounded once, on the host.
    """
    if cap is None:
        s = products * inner
        t = s
    else:
        t = tanh(products * inner, ACCURATE)
        s = t * cap
    if slope is not None:
        ahead = (k_start - q_start - stride * i).to(tl.float32) + (stride * j).to(tl.float32)
        s += (slope * LOG2E) * ahead
    return s, t


@triton.jit
def streams(draw_ptr, streams_BH, B, H, BLOCK: tl.constexpr):
    """The key by which dropout draws for every batch row and head (ring_attn_core.dropout)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(draw_ptr).to(tl.uint64) | (tl.load(draw_ptr + 1).to(tl.uint64) << 32)
    batch, head = (tl.load(draw_ptr + 2) + at // H).to(tl.uint32), (tl.load(draw_ptr + 3) + at % H).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, head * 0, head * 0, head, batch)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(streams_BH + at, word, mask=at < B * H)


@triton.jit
def kept(
    key,
    threshold,
    q_pos,
    k_pos,
    q_first,
    k_first,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BY_KEYS: tl.constexpr,
):
    """bool [QUERIES, KEYS], or [KEYS, QUERIES] BY_KEYS: which probabilities dropout keeps (ring_attn_core.dropout).

    ``key``: of the batch row and head; ``threshold`` in the upper half of a word; positions ``q_pos`` [QUERIES] and ``k_pos``
    [KEYS], the first ones ``q_first`` and ``k_first``. ALIGNED: they are consecutive from multiples of 16 on, so that one counter
    serves the probabilities that a thread has side by side, eight, or four of the eight BY_KEYS; else each pays for a counter.
    """
    if ALIGNED and BY_KEYS:
        j = tl.arange(0, KEYS // 2)[:, None]
        of_q, of_k = q_first // 2 + tl.arange(0, QUERIES // 2), k_first // 4 + j // 2
        a, b = philox2x32(of_q[None, :], of_k, key)  # pyright: ignore[reportGeneralTypeIssues]
        keep = tl.join(halves_kept(turned(a, j % 2), threshold), halves_kept(turned(b, j % 2), threshold))
        keep = tl.permute(tl.reshape(keep, [KEYS // 16, 8, QUERIES // 16, 8, 2, 2]), (0, 4, 1, 2, 5, 3))
        keep = tl.reshape(keep, [KEYS, QUERIES])
    elif ALIGNED:
        of_q, of_k = q_first // 2 + tl.arange(0, QUERIES // 2), k_first // 4 + tl.arange(0, KEYS // 4)
        a, b = philox2x32(of_q[:, None], of_k[None, :], key)  # pyright: ignore[reportGeneralTypeIssues]
        keep = tl.join(quarters_kept(a, threshold), quarters_kept(b, threshold))
        keep = tl.permute(tl.reshape(keep, [QUERIES // 16, 8, KEYS // 16, 4, 2, 2, 2]), (0, 6, 1, 2, 4, 3, 5))
        keep = tl.reshape(keep, [QUERIES, KEYS])
    else:
        q, k = (q_pos[None, :], k_pos[:, None]) if BY_KEYS else (q_pos[:, None], k_pos[None, :])
        a, b = philox2x32(q // 16 * 8 + q % 8, k // 16 * 4 + k % 8 // 2, key)  # pyright: ignore[reportGeneralTypeIssues]
        keep = turned(tl.where(q // 8 % 2 == 0, a, b), k // 8 % 2 * 2 + k % 2) >= threshold
    return keep


@triton.jit
def philox2x32(of_q, of_k, key):
    """Two uint32 words of counters of int32 words, broadcast against each other."""
    a, b = tl.broadcast(of_q.to(tl.uint32), of_k.to(tl.uint32))
    for _ in tl.static_range(ROUNDS):  # pyright: ignore[reportGeneralTypeIssues]
        product = a.to(tl.uint64) * MULTIPLIER
        a, b = (product >> 32).to(tl.uint32) ^ key ^ b, product.to(tl.uint32)
        key += WEYL
    return a, b


@triton.jit
def turned(word, turn):
    """Words rotated left by ``turn`` bytes."""
    left = (turn * 8).to(tl.uint32)
    return (word << left) | (word >> (32 - left) % 32)


@triton.jit
def halves_kept(word, threshold):
    """bool [..., 2] of words turned by 0 and by 2 bytes."""
    return tl.join(word >= threshold, (word << 16) >= threshold)


@triton.jit
def quarters_kept(word, threshold):
    """bool [..., 2, 2] of words turned by 0 and 2 bytes, and by 1 and 3: keys k and k + 8, k + 1 and k + 9."""
    return tl.join(halves_kept(word, threshold), halves_kept((word << 8) | (word >> 24), threshold))
