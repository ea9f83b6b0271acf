"""Tile sizes and tile ranges as pure functions, with measured reasons beside most numbers.

No tile is tuned at run time. The table lists functions, their kernels, the call properties they choose by, and callers:

    choose_tiles       portable kernels      kernel, dtype, widths, compute capability, features    call.py
    latent_tiles       forward, v in k       dtype, widths, compute capability, features            call.py
    decode_tiles       decode (decode.py)    query rows, width, dtypes, compute capability          decode.py
    hopper_passes      Hopper's backward     widths, query heads per key head, keys, extents        steps.py
    hopper_tiles       Hopper's forward      widths, features                                       hopper/launches.py
    wide_tiles         two-pass backward     widths, keys                                           hopper/wide_launches.py
    blockwise_tiles    backend "blockwise"   batch * query heads, tokens of a run                   attend/tiles.py

widths: padded head dimensions of q, k and of v; features: softcap and the optional arrays. ``decode_tiles`` is defined in
decode.py; attend/tiles.py is in both packages. ``hopper_passes`` chooses between one pass and two. The tiles of the
one-pass backward have ``HOPPER_BACKWARD_KEYS`` keys; ``queries`` of hopper/launches.py returns their number of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..runs import clamp, only_where

MASK_BLOCK = 1024
"""Number of keys whose bits of the key mask one program unpacks."""
MASK_SPAN = 64
"""Number of keys of a span; one flag per span records whether the key mask hides any of them."""

WIDEST = 512
"""Largest head dimension of the portable kernels."""
WIDEST_TAIL = 128
"""Largest width of k's second tile in the portable forward (``tail_of``)."""

HOPPER_BACKWARD_KEYS = 128
"""Number of keys per program of the one-pass Hopper backward: 64 for each of its two warpgroups."""


@dataclass(frozen=True)
class TileConfig:
    """A tile's queries and keys, warps per program, tiles in flight (``stages``), and whether TMA may read tiles."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    tma: bool = False


def shared_memory(capability: int) -> int:
    """Return the most shared memory of a thread block, in bytes (CUDA C++ Programming Guide, technical specifications)."""
    return {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448, 110: 232448}.get(capability, 101376)


def pad_width(width: int) -> int:
    """Return the columns to which a tile pads heads of ``width``: a power of two, at least 64. Sixteen would do, but Triton
    3.6 miscomputes products on Hopper if the right operand, copied from registers as a masked v is, has 16-bit rows of less than
    128 bytes."""
    return max(64, 1 << (width - 1).bit_length())


def choose_tiles(
    kernel: str, dtype: str, head_dim: int, v_dim: int, capability: int, features: frozenset[str] = frozenset()
) -> TileConfig:
    """Return the tiles of a kernel ("forward", "delta", "dq", "dkv") for padded head dimensions. Comments: ms on one H200 with
    bf16, a causal mask, 16,384 tokens, and 16 heads of 128 or 32 of 64; second-best choices in brackets. Triton unrolls float32
    products, and would take minutes to compile larger tiles."""
    width = max(head_dim, v_dim)
    tma = capability >= 90
    if kernel == "delta":
        return TileConfig(16 if width > 256 else 32 if width > 128 else 64, 0, 4, 1)
    if dtype == "float32":
        return TileConfig(16, 16, 4, 1) if width > 128 else TileConfig(32, 32, 4, 1)
    if width > 256:
        return TileConfig(*_of_512(kernel, capability, features))
    if shared_memory(capability) < 128 * 1024:  # workstation GPUs: tiles that fit, not measured
        if width > 128:
            return TileConfig(64, 64, 4, 1) if kernel == "forward" else TileConfig(32, 32, 4, 1)
        return TileConfig(32, 64, 4, 2) if kernel == "dkv" else TileConfig(64, 64, 4, 2)
    if width > 128:
        wide = {"forward": (128, 64, 8, 2), "dq": (64, 32, 4, 1), "dkv": (32, 64, 8, 1)}
        return TileConfig(*wide[kernel], tma)
    if width > 64:
        return TileConfig(*_of_128(kernel, capability, features), tma)
    narrow = {
        "forward": (64, 128, 4, 2),  # 2.52 (128 x 64, 8 warps 2.64)
        "dq": (64, 64, 4, 2),  # 2.89 (64 x 64 with 3 stages 3.00)
        "dkv": (64, 64, 4, 2) if "softcap" in features else (128, 64, 4, 2),  # 4.95 (32 x 128 6.05); with softcap it spills
    }
    return TileConfig(*narrow[kernel], tma)


def _of_128(kernel: str, capability: int, features: frozenset[str]) -> tuple[int, int, int, int]:
    """Return block_q, block_k, warps and stages for a padded head dimension of 128. The comments are as in ``choose_tiles``."""
    if kernel == "forward":
        if capability == 90:
            return 128, 128, 8, 3  # 2.18 (128 x 64 2.34)
        return (128, 128, 8, 2) if capability > 90 else (128, 64, 8, 3)  # limited by shared memory
    if kernel == "dq":
        return 128, 64, 8, 3  # 2.67 (64 x 64 2.82)
    if "softcap" in features:
        return 32, 64, 4, 3  # 6.27 (64 x 64 6.59)
    if "dropout_seed" in features:
        return 32, 64, 4, 2  # 6.29 (64 x 64 6.57, 3 stages 7.01)
    return 64, 64, 4, 2  # 4.46 (32 x 64 4.99, 64 x 128 with 8 warps 5.10)


def _of_512(kernel: str, capability: int, features: frozenset[str]) -> tuple[int, int, int, int, bool]:
    """Return block_q, block_k, warps, stages and tma for a padded head dimension of 512. Comments: ms on one H100, 4 heads of
    512. The backward does not use TMA, because its accumulators would then spill to memory."""
    if shared_memory(capability) < 128 * 1024:
        return (32, 16, 4, 1, False) if kernel == "forward" else (16, 16, 4, 1, False)
    if kernel == "forward":
        return (64, 32, 8, 2, True) if capability >= 90 else (32, 32, 4, 2, False)  # 5.05 (without TMA 5.72), 6.24
    stages = 2 if capability >= 90 else 1
    if kernel == "dq":
        if "dropout_seed" in features and capability >= 90:
            return 64, 16, 8, 2, False  # 15.8 without dropout; Triton 3.6 to 3.9 fail to compile 32 x 32 with every feature
        return 32, 32, 4, stages, False  # 9.88, 15.6 in one stage
    return 32, 16, 8, stages, False  # 22.8 (16 x 32 29.4), 29.1


def tail_of(head_dim: int, v_dim: int) -> int | None:
    """Return the width of k's second tile in the portable forward if the values are k's first ``v_dim`` columns. It is 0 if the
    first tile holds all columns, and None above ``WIDEST_TAIL``: the forward then reads k and v as separate tiles."""
    if pad_width(head_dim) == pad_width(v_dim):
        return 0
    return head_dim - v_dim if head_dim - v_dim <= WIDEST_TAIL else None


def latent_tiles(dtype: str, v_dim: int, tail: int, capability: int, features: frozenset[str] = frozenset()) -> TileConfig:
    """Return the tiles of the portable forward if the values are the first columns of k. A key tile then serves as k and as v.
    Comments: TFLOP/s on one H200 with bf16, a causal mask, 16,384 tokens, 16 query heads, one key head, head_dim 576 and v_dim
    512; slower choices in brackets."""
    if dtype != "float32" and v_dim == 256 and tail and shared_memory(capability) < 128 * 1024:
        return TileConfig(64, 32, 4, 1)
    by_extents = not features.isdisjoint({"extents", "key_extents"})
    if dtype != "float32" and v_dim > 256 and by_extents and capability < 90:
        return TileConfig(32, 16, 4, 2 if shared_memory(capability) > 128 * 1024 else 1)  # 32 keys would spill
    if dtype == "float32" or v_dim <= 256 or shared_memory(capability) < 200 * 1024:
        return choose_tiles("forward", dtype, max(v_dim, pad_width(tail)), v_dim, capability, features)
    if capability > 90 or by_extents or tail > 64:  # 64 keys would not fit, or spill
        return TileConfig(64, 32, 8, 2, tma=True)
    return TileConfig(64, 64, 8, 2, tma=True)  # 331 (without TMA 278, one stage of 128 keys 252, 32 keys in 3 stages 247)


@dataclass(frozen=True)
class HopperConfig:
    """Tiles of the Hopper forward, with 64 queries per warpgroup, ``stages`` key tiles in flight, and q read from registers or
    shared memory. The registers per thread, summed over all warpgroups, may be at most 65536 / 128."""

    block_q: int
    block_k: int
    stages: int
    q_in_registers: bool
    registers: int = 240
    producer_registers: int = 24


def hopper_tiles(head_dim: int, v_dim: int, features: frozenset[str] = frozenset()) -> HopperConfig:
    """Return the tiles of the Hopper forward for padded heads of 64, 128, 192 or 256. Comments: TFLOP/s on one H200 with bf16, a
    causal mask, 16,384 tokens, and 16 heads of 128 or 32 heads of 64; slower choices of the same run in brackets."""
    if v_dim > 128 or head_dim > 192:
        return HopperConfig(128, 64, 2, q_in_registers=False)  # limited by registers and shared memory
    if head_dim > 128:
        return HopperConfig(128, 128, 2, q_in_registers=False)
    if head_dim == 64:
        return HopperConfig(128, 128, 2, q_in_registers=True)  # 446 (192 queries 412, 64 keys 391)
    # 620 (599 without q in registers, 64 keys 538). The key mask, ALiBi and dropout need q's registers. In ms, without (with) q
    # in registers: key mask 2.05 (2.11) and ALiBi 2.08 (2.22), both in an earlier version of the kernel; dropout 2.56 (4.10).
    return HopperConfig(128, 128, 2, q_in_registers=not features & {"key_extents", "key_mask", "alibi_slopes", "dropout_seed"})


@dataclass(frozen=True)
class WideConfig:
    """Tiles of the two-pass Hopper backward; stages: an array's tiles in flight to shared memory. The pass of dq has ``block_q``
    queries, 64 per warpgroup, and ``block_k`` keys; that of dk and dv ``dkv_block_q`` queries. Products read q and dout, or k and
    v, from registers (``..._in_registers``) or shared memory."""

    block_q: int
    block_k: int
    k_stages: int
    v_stages: int
    dkv_block_q: int
    q_stages: int
    q_in_registers: bool
    kv_in_registers: bool
    registers: int = 240
    producer_registers: int = 24


def wide_tiles(head_dim: int, v_dim: int, tokens: int) -> WideConfig:
    """Return the tiles of the two-pass Hopper backward for padded heads of 64, 128, 192 or 256; ``tokens``: keys in a shard.

    Measured on one H200 with bf16 and a causal mask. Q/K heads means Q query heads and K key heads. With 16/16 heads, head_dim
    192, v_dim 128 and 16,384 tokens, the backward reaches 511 TFLOP/s, or 448 if products read k and v from shared memory. The
    table has TFLOP/s with head_dim 128, for tiles of 64 and of 128 queries in the pass of dk and dv:

        heads    sequences x tokens    64 queries    128 queries
        32/8     16 x 1,024               355            340
        32/8      8 x 2,048               419            396
        32/8      4 x 4,096               443            436
        64/8      4 x 4,096               432            459
    """
    if head_dim > 192:
        return WideConfig(128, 64, 2, 1 if v_dim > 192 else 2, 64, 2, False, False)  # limited by shared memory
    if head_dim > 128:
        return WideConfig(128, 64, 2, 2, 64, 3 if v_dim <= 128 else 2, False, kv_in_registers=v_dim <= 128)
    if tokens <= 2048:
        return WideConfig(128, 64, 2, 2, 64, 3, True, True)
    return WideConfig(128, 64, 2, 2, 128, 2, True, True)


DESIGN_LENGTHS = 2048, 4096, 8192
"""Tokens of a shard: one length in each range for which ``wide_tiles`` or ``hopper_passes`` chooses another design."""


def hopper_passes(head_dim: int, v_dim: int, query_heads: int, tokens: int, extents: bool = False) -> int:
    """Return the number of passes of the Hopper backward, 1 or 2; ``query_heads``: per key head. ``tokens``: keys of a shard.

    One pass computes 5 products. But in one pass the programs of different key tiles must add to dq one after the other, and for
    wide heads the sums dk and dv do not fit into registers. Two passes compute 7 products, and no program waits for another.

    The tables have TFLOP/s in one pass / two passes, with bf16, a causal mask and head_dim 128. Q/K means Q query heads and K key
    heads. On one H200, by sequences x tokens:

        heads    16 x 1,024   8 x 2,048   4 x 4,096   2 x 8,192   1 x 8,192   1 x 16,384
        32/8     285 / 355    320 / 419   402 / 443   480 / 460               522 / 459
        64/8     279 / 366                403 / 459               463 / 472
        16/16    306 / 309                478 / 410
        32/8                              354 / 324   (head_dim 64)

    On one H100, by tokens per document, in rows of 16,384 tokens. The last column has 65,536 tokens in documents of log-normal
    lengths with a median of 1,340:

        heads    1,024       2,048       4,096       16,384      log-normal
        64/8     245 / 332   294 / 397   383 / 432   493 / 441   321 / 391
        32/8     246 / 309               392 / 432   514 / 447   345 / 384
    """
    if head_dim != v_dim or head_dim > 128:
        return 2
    return 2 if head_dim == 128 and query_heads >= 4 and (extents or tokens <= 4096) else 1


def blockwise_tiles(score_rows: int, q_slot: int, k_slot: int) -> tuple[int, int]:
    """Return (block_q, block_k) of the backend "blockwise" in jnp or torch; ``score_rows``: batch size times query heads.

    A tile's scores should stay in the CPU caches from one operation to the next. Milliseconds of forward and backward on one AMD
    EPYC core with 4,096 tokens, a causal mask, head_dim 64 and float32, for tiles of 128 / 256 / 512 tokens:

        heads    PyTorch              JAX
        2         227 /  198 /  217    149 /  151 /  209
        8         785 /  785 /  867    769 /  753 / 1048
        32       3308 / 3444 / 5063   3347 / 3775 / 4576

    While a tile has more than 16 Mi scores, over all batch rows and heads, its number of queries is halved, down to 64.
    """
    known = isinstance(score_rows, int)  # False for a symbolic batch of jax.export, which may be of any size
    block = 256 if known and score_rows <= 16 else 128
    block_k = min(block, max(k_slot, 1))
    block_q = min(block, max(q_slot, 1))
    while known and block_q > 64 and score_rows * block_q * block_k > 1 << 24:
        block_q //= 2
    return block_q, block_k


def visible_tiles(m0: Any, m1: Any, lo: Any, hi: Any, begin: Any, end: Any, block_k: int) -> tuple[Any, Any]:
    """Return (first, last + 1) of the key tiles that queries ``m0 .. m1 - 1`` of a run see. Without any, first >= last + 1. Query
    i sees key j if ``lo <= i - j <= hi`` and ``begin <= j < end``; i and j are indices within their runs."""
    first = clamp(m0 - hi, begin, end) // block_k
    last = -(-clamp(m1 - lo, begin, end) // block_k)
    something = (lo <= hi) & (m0 < m1) & (begin < end) & (m0 - hi < end) & (m1 - lo > begin)
    return first, only_where(something, last)
