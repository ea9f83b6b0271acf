"""The gradients of one k/v shard from one rank's queries, in Triton (sm_80 and later).

    dv_j = sum_i z_ij p_ij dout_i        p_ij: probability; z_ij: dropout factor      formulas in backward_dq.py
    dk_j = scale sum_i ds_ij q_i         ds_ij: gradient of the score

One pass over the queries that see a tile of keys, for each query head of the group (FlashAttention-2, arXiv:2307.08691, algorithm
2).

Shapes     q_BSHD, dout_BSHE, k_BTGD, v_BTGE, lse2_BHS and delta_BHS f32, bounds int32 [B, q tiles, 4] (backward_sums.py)
           -> dk_BTGD, dv_BTGE, or both packed in one array dk_BTGD. For the letters and the other arrays see forward.py
Program    one (k tile, key head, batch row), k tiles fastest; a k tile lies within one run of keys (runs.py)
Q tiles    those that the band, the extents (by their ``bounds``) and the key extents all allow. A q tile that sees the whole
           k tile usually needs no mask (``tiles_in_bounds`` has the exceptions)
State      FIRST: dk and dv start at 0; else at dk_in and dv_in (f32), which dk and dv may overwrite in place
Precision  products in the input dtype, sums in f32; p and ds are rounded once to the input dtype
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .dropout import keep_mask_of_tile
from .loads import add_product, load_own_tile, load_tile
from .records import Columns, KernelArguments, KernelConstants, KeyTile
from .rows import (
    K_LEN,
    NOTHING_BEGINS,
    ROW_FIELDS,
    Tiles,
    count_partly_seen,
    keys_seen,
    load_row,
    partly_seen,
    seen_from,
    tiles_in_band,
    tiles_in_extents,
)
from .scores import scores

SCAN = tl.constexpr(64)
"""Number of query tiles whose bounds are read at a time."""


class QueryArrays(NamedTuple):
    """The arrays of the queries: ``q`` and ``dout`` as pointers or TMA descriptors, ``lse2`` and ``delta`` f32 [B, H, S]."""

    q: Any
    dout: Any
    lse2: Any
    delta: Any


@triton.jit
def dkv(
    q_BSHD,
    dout_BSHE,
    k_BTGD,
    v_BTGE,
    lse2_BHS,
    delta_BHS,
    rows_ptr,
    extents_ptr,
    key_extents_ptr,
    key_mask_BT,
    alibi_slopes_ptr,
    dropout_BH,
    bounds_ptr,
    dk_in_BTGD,
    dv_in_BTGE,
    dk_BTGD,
    dv_BTGE,
    scale,
    inner,
    softcap,
    threshold,
    rescale,
    S,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_COLUMN: tl.constexpr,
    Q_RUNS: tl.constexpr,
    K_RUNS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    FIRST: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dk and dv of one key tile."""
    sizes: tl.constexpr = KernelConstants(
        H, G, BLOCK_Q, BLOCK_K,
        Columns(H, D, 0, D, BLOCK_D, TMA), Columns(H, E, 0, E, BLOCK_E, TMA),
        Columns(G, K_STRIDE, 0, D, BLOCK_D, TMA), Columns(G, V_STRIDE, V_COLUMN, E, BLOCK_E, TMA),
        None, None, ALIGNED, PRECISION, None,
    )  # fmt: skip
    queries = QueryArrays(q_BSHD, dout_BSHE, lse2_BHS, delta_BHS)
    args = KernelArguments(
        None, None, extents_ptr, key_extents_ptr, key_mask_BT, None, alibi_slopes_ptr, dropout_BH,
        inner, softcap, threshold, rescale, S, T,
    )  # fmt: skip
    k_slot = T // K_RUNS
    tiles_of_run = tl.cdiv(k_slot, BLOCK_K)
    program = tl.program_id(0)
    number = program % (K_RUNS * tiles_of_run)
    group = program // (K_RUNS * tiles_of_run) % G
    batch = program // (K_RUNS * tiles_of_run) // G
    k_run = number // tiles_of_run
    n0 = number % tiles_of_run * BLOCK_K
    j = n0 + tl.arange(0, BLOCK_K)
    token = k_run * k_slot + n0

    k_tile = load_own_tile(k_BTGD, batch, T, token, group, k_slot - n0, sizes.K, BLOCK_K)
    v_tile = load_own_tile(v_BTGE, batch, T, token, group, k_slot - n0, sizes.V, BLOCK_K)
    tile = KeyTile(batch, n0, k_tile, v_tile)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_E], tl.float32)
    q_slot = S // Q_RUNS
    for q_run in range(Q_RUNS):
        row = load_row(rows_ptr, q_run * K_RUNS + k_run)
        n1 = tl.minimum(n0 + BLOCK_K, row.k_len)
        tiles = tiles_in_band(n0, n1, -row.hi, -row.lo, row.q_len, BLOCK_Q)
        if extents_ptr is not None:
            tiles_of_q_run = tl.cdiv(q_slot, BLOCK_Q)
            k_first, k_last = row.k_start + row.stride * n0, row.k_start + row.stride * (n1 - 1)
            tiles = tiles_in_bounds(tiles, bounds_ptr, batch, q_run, tiles_of_q_run, k_first, k_last, Q_RUNS)
        if key_extents_ptr is not None:
            begin, end = seen_from(j, key_extents_ptr, batch, T, row)
            tiles = tiles_in_extents(tiles, begin, end, j < row.k_len, BLOCK_Q)
        parts = count_partly_seen(tiles)
        for t in range(parts * (H // G)):
            m0, head = partly_seen(t % parts, tiles) * BLOCK_Q, group * (H // G) + t // parts
            dk, dv = visit_queries(dk, dv, queries, m0, head, row, tile, args, sizes, True)
        wholes = tiles.whole_last - tiles.whole_first
        for t in range(wholes * (H // G)):
            m0, head = (tiles.whole_first + t % wholes) * BLOCK_Q, group * (H // G) + t // wholes
            dk, dv = visit_queries(dk, dv, queries, m0, head, row, tile, args, sizes, False)

    dk *= scale
    dv *= rescale
    inside = j < k_slot
    seen = j < tl.load(rows_ptr + k_run * ROW_FIELDS + K_LEN)
    if key_mask_BT is not None:
        seen &= tl.load(key_mask_BT + batch.to(tl.int64) * T + k_run * k_slot + j, mask=seen, other=0.0) > 0.0
    dk, dv = tl.where(seen[:, None], dk, 0.0), tl.where(seen[:, None], dv, 0.0)
    at = (batch.to(tl.int64) * T + k_run * k_slot + j)[:, None] * G + group
    d, e = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    at_dk, at_dv = at * K_STRIDE + d, at * V_STRIDE + V_COLUMN + e
    inside_dk, inside_dv = inside[:, None] & (d < D), inside[:, None] & (e < E)
    dv_to = dk_BTGD if dv_BTGE is None else dv_BTGE
    if not FIRST:
        dv_from = dk_in_BTGD if dv_in_BTGE is None else dv_in_BTGE
        dk += tl.load(dk_in_BTGD + at_dk, mask=inside_dk, other=0.0)
        dv += tl.load(dv_from + at_dv, mask=inside_dv, other=0.0)
    tl.store(dk_BTGD + at_dk, dk.to(dk_BTGD.dtype.element_ty), mask=inside_dk)
    tl.store(dv_to + at_dv, dv.to(dv_to.dtype.element_ty), mask=inside_dv)


@triton.jit
def visit_queries(dk, dv, queries, m0, head, row, tile, args, sizes: tl.constexpr, MASKED: tl.constexpr):
    """Add the query tile at ``m0`` to dk and dv and return them; the caller multiplies dk by scale and dv by rescale."""
    ACCURATE: tl.constexpr = tile.k.dtype == tl.float32
    i = m0 + tl.arange(0, sizes.BLOCK_Q)
    j = tile.n0 + tl.arange(0, sizes.BLOCK_K)
    limit = row.q_len - m0
    q_tile = load_tile(queries.q, tile.batch, args.S, row.q_base + m0, head, limit, sizes.Q, sizes.BLOCK_Q, MASKED)
    dout_tile = load_tile(queries.dout, tile.batch, args.S, row.q_base + m0, head, limit, sizes.DOUT, sizes.BLOCK_Q, MASKED)
    at_sums = (tile.batch * sizes.H + head).to(tl.int64) * args.S + row.q_base + i
    lse2 = tl.load(queries.lse2 + at_sums, mask=i < row.q_len, other=float("inf"))
    delta = tl.load(queries.delta + at_sums, mask=i < row.q_len, other=0.0)
    slope = None if args.alibi_slopes is None else tl.load(args.alibi_slopes + head).to(tl.float32)
    products = tl.dot(tile.k, tl.trans(q_tile), input_precision=sizes.PRECISION)
    s, t = scores(products, i[None, :], j[:, None], slope, row, args, ACCURATE)
    p = tl.exp2(s - lse2[None, :])
    if MASKED:
        begin, end = keys_seen(i, args.extents, tile.batch, args.S, row)
        visible = (j[:, None] >= begin[None, :]) & (j[:, None] < end[None, :])
        if args.key_extents is not None:
            first, last = seen_from(j, args.key_extents, tile.batch, args.T, row)
            visible &= (i[None, :] >= first[:, None]) & (i[None, :] < last[:, None])
        p = tl.where(visible, p, 0.0)
    dropped = p
    if args.dropout is not None:
        keep = keep_mask_of_tile(args, tile.batch, head, row, i, j, m0, tile.n0, sizes, True)
        dropped, p = tl.where(keep, p, 0.0), tl.where(keep, p, -p)  # from here on the sign of p is the dropout mask
    dv = add_product(dv, dropped.to(dout_tile.dtype), dout_tile, args.S, sizes.PRECISION)
    dp = tl.dot(tile.v, tl.trans(dout_tile), input_precision=sizes.PRECISION)
    if args.dropout is not None:
        dp = tl.where(p > 0, dp * args.rescale, 0.0)
        p = tl.abs(p)
    ds = p * (dp - delta[None, :])
    if args.softcap is not None:
        ds *= 1.0 - t * t
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    dk = add_product(dk, ds.to(q_tile.dtype), q_tile, args.S, sizes.PRECISION)
    return dk, dv


@triton.jit
def tiles_in_bounds(tiles, bounds_ptr, batch, q_run, tiles_of_run, k_first, k_last, Q_RUNS: tl.constexpr):
    """Return query ``tiles`` without those at either end whose extents exclude all positions ``k_first .. k_last`` of the key
    tile. A tile needs no mask if it is whole in ``tiles`` and each of its extents contains the key tile; if such tiles are not
    consecutive, all are masked."""
    first, last = tiles.first, tiles.last
    lowest, highest = last, first
    whole_lowest, whole_highest, wholes = last, first, 0
    for at in range(first, last, SCAN):
        tile = at + tl.arange(0, SCAN)
        inside = tile < last
        bounds = bounds_ptr + ((batch.to(tl.int64) * Q_RUNS + q_run) * tiles_of_run + tile) * 4
        least = tl.load(bounds, mask=inside, other=NOTHING_BEGINS)
        greatest = tl.load(bounds + 1, mask=inside, other=0)
        all_least = tl.load(bounds + 2, mask=inside, other=NOTHING_BEGINS)
        all_greatest = tl.load(bounds + 3, mask=inside, other=0)
        some = inside & (least <= k_last) & (greatest > k_first)
        lowest = tl.minimum(lowest, tl.min(tl.where(some, tile, last), 0))
        highest = tl.maximum(highest, tl.max(tl.where(some, tile + 1, first), 0))
        whole = (tile >= tiles.whole_first) & (tile < tiles.whole_last) & (all_least <= k_first) & (all_greatest > k_last)
        whole_lowest = tl.minimum(whole_lowest, tl.min(tl.where(whole, tile, last), 0))
        whole_highest = tl.maximum(whole_highest, tl.max(tl.where(whole, tile + 1, first), 0))
        wholes += tl.sum(whole.to(tl.int32), 0)
    highest = tl.maximum(highest, lowest)
    gaps = whole_highest - whole_lowest != wholes
    whole_lowest = tl.where(gaps | (wholes == 0), lowest, whole_lowest)
    whole_highest = tl.where(gaps | (wholes == 0), lowest, whole_highest)
    return Tiles(lowest, highest, whole_lowest, whole_highest)
