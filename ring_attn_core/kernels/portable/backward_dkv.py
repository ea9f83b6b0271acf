"""The gradients of one shard of keys and values from one rank's queries."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import kept
from .loads import add_product, load_own_tile, load_tile
from .rows import NOTHING_BEGINS, ROW_FIELDS, keys_seen, load_row, partly_seen, tiles_in_band
from .scores import scores

K_LEN = tl.constexpr(6)
SCAN = tl.constexpr(64)


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
    ceiling_BT,
    slopes_ptr,
    streams_BH,
    bounds_ptr,
    dk_in_BTGD,
    dv_in_BTGE,
    dk_BTGD,
    dv_BTGE,
    scale,
    inner,
    cap,
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
    """dk and dv of a tile of keys: one pass over the queries that see them, of every query head of the group."""
    slot = T // K_RUNS
    tiles = tl.cdiv(slot, BLOCK_K)
    program = tl.program_id(0)
    tile = program % (K_RUNS * tiles)
    group = program // (K_RUNS * tiles) % G
    batch = program // (K_RUNS * tiles) // G
    k_run = tile // tiles
    n0 = tile % tiles * BLOCK_K
    j = n0 + tl.arange(0, BLOCK_K)
    token = k_run * slot + n0

    k_tile = load_own_tile(k_BTGD, batch, T, token, group, slot - n0, G, K_STRIDE, 0, D, BLOCK_K, BLOCK_D, TMA)
    v_tile = load_own_tile(v_BTGE, batch, T, token, group, slot - n0, G, V_STRIDE, V_COLUMN, E, BLOCK_K, BLOCK_E, TMA)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_E], tl.float32)
    q_slot = S // Q_RUNS
    for q_run in range(Q_RUNS):
        lo, hi, q_base, q_len, q_start, k_base, k_len, k_start, stride = load_row(rows_ptr, q_run * K_RUNS + k_run)
        n1 = tl.minimum(n0 + BLOCK_K, k_len)
        first, last, whole_first, whole_last = tiles_in_band(n0, n1, -hi, -lo, q_len, BLOCK_Q)
        if extents_ptr is not None:
            first, last, whole_first, whole_last = within_extents(
                first, last, whole_first, whole_last, bounds_ptr, batch, Q_RUNS, q_run, tl.cdiv(q_slot, BLOCK_Q),
                k_start + stride * n0, k_start + stride * (n1 - 1), stride
            )  # fmt: skip
        parts = last - first - (whole_last - whole_first)
        for t in range(parts * (H // G)):
            dk, dv = visit_queries(
                dk, dv, k_tile, v_tile, q_BSHD, dout_BSHE, lse2_BHS, delta_BHS, extents_ptr, slopes_ptr, streams_BH,
                inner, cap, threshold, rescale,
                partly_seen(t % parts, first, whole_first, whole_last) * BLOCK_Q, n0, batch, group * (H // G) + t // parts,
                S, lo, hi, q_base, q_len, q_start, k_len, k_start, stride,
                H, D, E, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_E, True, ALIGNED, TMA, PRECISION,
            )  # fmt: skip
        wholes = whole_last - whole_first
        for t in range(wholes * (H // G)):
            dk, dv = visit_queries(
                dk, dv, k_tile, v_tile, q_BSHD, dout_BSHE, lse2_BHS, delta_BHS, extents_ptr, slopes_ptr, streams_BH,
                inner, cap, threshold, rescale,
                (whole_first + t % wholes) * BLOCK_Q, n0, batch, group * (H // G) + t // wholes,
                S, lo, hi, q_base, q_len, q_start, k_len, k_start, stride,
                H, D, E, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_E, False, ALIGNED, TMA, PRECISION,
            )  # fmt: skip

    dk *= scale
    dv *= rescale
    inside = j < slot
    seen = j < tl.load(rows_ptr + k_run * ROW_FIELDS + K_LEN)
    if ceiling_BT is not None:
        seen &= tl.load(ceiling_BT + batch.to(tl.int64) * T + k_run * slot + j, mask=seen, other=0.0) > 0.0
    dk, dv = tl.where(seen[:, None], dk, 0.0), tl.where(seen[:, None], dv, 0.0)
    at = (batch.to(tl.int64) * T + k_run * slot + j)[:, None] * G + group
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
def visit_queries(
    dk, dv, k_tile, v_tile, q_BSHD, dout_BSHE, lse2_BHS, delta_BHS, extents_ptr, slopes_ptr, streams_BH,
    inner, cap, threshold, rescale,
    query, key, batch, head, S, lo, hi, q_base, q_len, q_start, k_len, k_start, stride,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    MASKED: tl.constexpr, ALIGNED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv with the part of the queries of one tile, from query ``query`` of the run on."""
    ACCURATE: tl.constexpr = k_tile.dtype == tl.float32
    i = query + tl.arange(0, BLOCK_Q)
    j = key + tl.arange(0, BLOCK_K)
    limit = q_len - query
    q_tile = load_tile(q_BSHD, batch, S, q_base + query, head, limit, H, D, 0, D, BLOCK_Q, BLOCK_D, MASKED, TMA)
    dout_tile = load_tile(dout_BSHE, batch, S, q_base + query, head, limit, H, E, 0, E, BLOCK_Q, BLOCK_E, MASKED, TMA)
    at_sums = (batch * H + head).to(tl.int64) * S + q_base + i
    lse2 = tl.load(lse2_BHS + at_sums, mask=i < q_len, other=float("inf"))
    delta_tile = tl.load(delta_BHS + at_sums, mask=i < q_len, other=0.0)
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head).to(tl.float32)
    products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    s, t = scores(products, i[None, :], j[:, None], slope, inner, cap, q_start, k_start, stride, ACCURATE)
    p = tl.exp2(s - lse2[None, :])
    if MASKED:
        begin, end = keys_seen(i, extents_ptr, batch, S, lo, hi, q_base, q_len, k_len, k_start, stride)
        visible = (j[:, None] >= begin[None, :]) & (j[:, None] < end[None, :])
        p = tl.where(visible, p, 0.0)
    dropped = p
    if streams_BH is not None:
        q_pos, k_pos = q_start + stride * i, k_start + stride * j
        q_first, k_first = q_start + stride * query, k_start + stride * key
        stream = tl.load(streams_BH + batch * H + head)
        keep = kept(stream, threshold, q_pos, k_pos, q_first, k_first, BLOCK_Q, BLOCK_K, ALIGNED, True)
        dropped, p = tl.where(keep, p, 0.0), tl.where(keep, p, -p)  # its sign goes on saying what is kept
    dv = add_product(dv, dropped.to(dout_tile.dtype), dout_tile, S, PRECISION)
    dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
    if streams_BH is not None:
        dp = tl.where(p > 0, dp * rescale, 0.0)
        p = tl.abs(p)
    ds = p * (dp - delta_tile[None, :])
    if cap is not None:
        ds *= 1.0 - t * t
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    dk = add_product(dk, ds.to(q_tile.dtype), q_tile, S, PRECISION)
    return dk, dv


@triton.jit
def within_extents(
    first, last, whole_first, whole_last, bounds_ptr, batch, RUNS: tl.constexpr, run, tiles, k_first, k_last, stride
):
    """The part of a range of query tiles of which some query may see the keys k_first .. k_last, and of which all see all.

    ``bounds``: see ``extent_bounds``. Where the whole tiles have gaps between them, all are taken for partly seen.
    """
    lowest, highest = last, first
    whole_lowest, whole_highest, wholes = last, first, 0
    for at in range(first, last, SCAN):
        tile = at + tl.arange(0, SCAN)
        inside = tile < last
        bounds = bounds_ptr + ((batch.to(tl.int64) * RUNS + run) * tiles + tile) * 4
        least = tl.load(bounds, mask=inside, other=NOTHING_BEGINS)
        greatest = tl.load(bounds + 1, mask=inside, other=0)
        all_least = tl.load(bounds + 2, mask=inside, other=NOTHING_BEGINS)
        all_greatest = tl.load(bounds + 3, mask=inside, other=0)
        some = inside & (least <= k_last) & (greatest > k_first)
        lowest = tl.minimum(lowest, tl.min(tl.where(some, tile, last), 0))
        highest = tl.maximum(highest, tl.max(tl.where(some, tile + 1, first), 0))
        whole = (tile >= whole_first) & (tile < whole_last) & (all_least <= k_first) & (all_greatest > k_last)
        whole_lowest = tl.minimum(whole_lowest, tl.min(tl.where(whole, tile, last), 0))
        whole_highest = tl.maximum(whole_highest, tl.max(tl.where(whole, tile + 1, first), 0))
        wholes += tl.sum(whole.to(tl.int32), 0)
    highest = tl.maximum(highest, lowest)
    gaps = whole_highest - whole_lowest != wholes
    whole_lowest = tl.where(gaps | (wholes == 0), lowest, whole_lowest)
    whole_highest = tl.where(gaps | (wholes == 0), lowest, whole_highest)
    return lowest, highest, whole_lowest, whole_highest
