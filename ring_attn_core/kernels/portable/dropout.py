"""The dropout mask, computed by Philox from global positions (formulas in ring_attn_core.dropout).

    dropout_BH[b, h] = philox4x32((0, 0, head, batch), seed)[0]     ``stream``: the Philox key of a global batch row and head
    words            = philox2x32((of_q, of_k), stream)             two words, for the eight probabilities of one counter
    of_q, of_k       = q_pos // 16 * 8 + q_pos % 8, k_pos // 16 * 4 + k_pos % 8 // 2        the two words of the counter
    word             = words[q_pos // 8 % 2] rotated left by k_pos // 8 % 2 * 2 + k_pos % 2 bytes
    kept if the upper 16 bits of word >= threshold                  threshold: ``dropout_rate`` times 2^16, rounded

Shapes     dropout_seed uint32 [4]: two words of the seed, then the global index of the first batch row and of the first head
           -> dropout_BH uint32 [B, H]; masks bool [queries, keys], or [keys, queries] if BY_KEYS
Program    of ``philox_keys``: one for BLOCK pairs (batch row, head)
Units      positions are token positions of the global sequence; kernels get ``threshold`` times 2^16, to compare with whole words
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import dropout

ROUNDS = tl.constexpr(dropout.ROUNDS)
MULTIPLIER = tl.constexpr(dropout.MULTIPLIER_OF_2)
WEYL = tl.constexpr(dropout.WEYL[0])


@triton.jit
def philox_keys(dropout_seed_ptr, dropout_BH, B, H, BLOCK: tl.constexpr):
    """Compute and store dropout's Philox key of every batch row and head."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(dropout_seed_ptr).to(tl.uint64) | (tl.load(dropout_seed_ptr + 1).to(tl.uint64) << 32)
    batch = (tl.load(dropout_seed_ptr + 2) + at // H).to(tl.uint32)
    head = (tl.load(dropout_seed_ptr + 3) + at % H).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, head * 0, head * 0, head, batch)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(dropout_BH + at, word, mask=at < B * H)


@triton.jit
def keep_mask_of_tile(args, batch, head, row, i, j, m0, n0, sizes: tl.constexpr, BY_KEYS: tl.constexpr):
    """Return a tile's dropout mask, bool [queries, keys], or [keys, queries] if BY_KEYS; True keeps a probability."""
    q_pos, k_pos = row.q_start + row.stride * i, row.k_start + row.stride * j
    q_first, k_first = row.q_start + row.stride * m0, row.k_start + row.stride * n0
    stream = tl.load(args.dropout + batch * sizes.H + head)
    return keep_mask(
        stream, args.threshold, q_pos, k_pos, q_first, k_first, sizes.BLOCK_Q, sizes.BLOCK_K, sizes.ALIGNED, BY_KEYS
    )  # fmt: skip


@triton.jit
def keep_mask(
    stream,
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
    """Return the dropout mask, bool [QUERIES, KEYS], or [KEYS, QUERIES] if BY_KEYS; True keeps a probability. ``stream``: the
    Philox key. ALIGNED: positions are consecutive from multiples of 16, so a thread calls Philox once for eight probabilities
    (BY_KEYS: four)."""
    if ALIGNED and BY_KEYS:
        j = tl.arange(0, KEYS // 2)[:, None]
        q_place, k_place = q_first // 2 + tl.arange(0, QUERIES // 2), k_first // 4 + j // 2
        a, b = philox2x32(q_place[None, :], k_place, stream)  # pyright: ignore[reportGeneralTypeIssues]
        keep = tl.join(keep_halves(rotate(a, j % 2), threshold), keep_halves(rotate(b, j % 2), threshold))
        keep = tl.permute(tl.reshape(keep, [KEYS // 16, 8, QUERIES // 16, 8, 2, 2]), (0, 4, 1, 2, 5, 3))
        keep = tl.reshape(keep, [KEYS, QUERIES])
    elif ALIGNED:
        q_place, k_place = q_first // 2 + tl.arange(0, QUERIES // 2), k_first // 4 + tl.arange(0, KEYS // 4)
        a, b = philox2x32(q_place[:, None], k_place[None, :], stream)  # pyright: ignore[reportGeneralTypeIssues]
        keep = tl.join(keep_quarters(a, threshold), keep_quarters(b, threshold))
        keep = tl.permute(tl.reshape(keep, [QUERIES // 16, 8, KEYS // 16, 4, 2, 2, 2]), (0, 6, 1, 2, 4, 3, 5))
        keep = tl.reshape(keep, [QUERIES, KEYS])
    else:
        q, k = (q_pos[None, :], k_pos[:, None]) if BY_KEYS else (q_pos[:, None], k_pos[None, :])
        a, b = philox2x32(q // 16 * 8 + q % 8, k // 16 * 4 + k % 8 // 2, stream)  # pyright: ignore[reportGeneralTypeIssues]
        keep = rotate(tl.where(q // 8 % 2 == 0, a, b), k // 8 % 2 * 2 + k % 2) >= threshold
    return keep


@triton.jit
def philox2x32(q_place, k_place, stream):
    """Return the two uint32 words of Philox for counters of two int32 words that broadcast; ``stream`` is the key."""
    a, b = tl.broadcast(q_place.to(tl.uint32), k_place.to(tl.uint32))
    for _ in tl.static_range(ROUNDS):  # pyright: ignore[reportGeneralTypeIssues]
        product = a.to(tl.uint64) * MULTIPLIER
        a, b = (product >> 32).to(tl.uint32) ^ stream ^ b, product.to(tl.uint32)
        stream += WEYL
    return a, b


@triton.jit
def rotate(word, turn):
    """Return each uint32 word rotated left by ``turn`` bytes."""
    left = (turn * 8).to(tl.uint32)
    return (word << left) | (word >> (32 - left) % 32)


@triton.jit
def keep_halves(word, threshold):
    """Return the mask, bool [..., 2]: entry 0 compares the word's upper 16 bits with ``threshold``, entry 1 its lower 16 bits."""
    return tl.join(word >= threshold, (word << 16) >= threshold)


@triton.jit
def keep_quarters(word, threshold):
    """Return the mask, bool [..., 2, 2], of the four keys that share each word. Entry [..., a, b] belongs to key k + 8 a + b and
    tests the upper 16 bits of the word rotated left by 2 a + b bytes."""
    return tl.join(keep_halves(word, threshold), keep_halves((word << 8) | (word >> 24), threshold))
