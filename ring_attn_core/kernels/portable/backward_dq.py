"""The gradient of the queries of one rank over one shard of keys."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import kept
from .loads import add_product, keep_seen, load_own_tile, load_tile, some_hidden, under_ceiling
from .rows import keys_seen, load_row, partly_seen, tiles_in_band, tiles_in_extents
from .scores import scores


@triton.jit
def dq(
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
    hidden_ptr,
    dq_in_BSHD,
    dq_BSHD,
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
    LAST: tl.constexpr,
    CLEAN: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of a tile of queries: one pass over the keys that they see."""
    slot = S // Q_RUNS
    tiles = tl.cdiv(slot, BLOCK_Q)
    program = tl.program_id(0)
    tile = Q_RUNS * tiles - 1 - program % (Q_RUNS * tiles)
    head = program // (Q_RUNS * tiles) % H
    batch = program // (Q_RUNS * tiles) // H
    q_run = tile // tiles
    m0 = tile % tiles * BLOCK_Q
    i = m0 + tl.arange(0, BLOCK_Q)
    q_token = q_run * slot + m0

    q_tile = load_own_tile(q_BSHD, batch, S, q_token, head, slot - m0, H, D, 0, D, BLOCK_Q, BLOCK_D, TMA)
    dout_tile = load_own_tile(dout_BSHE, batch, S, q_token, head, slot - m0, H, E, 0, E, BLOCK_Q, BLOCK_E, TMA)
    at_sums = (batch * H + head).to(tl.int64) * S + q_run * slot + i
    lse2 = tl.load(lse2_BHS + at_sums, mask=i < slot, other=float("inf"))
    delta_tile = tl.load(delta_BHS + at_sums, mask=i < slot, other=0.0)
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head).to(tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    visited = 0
    for k_run in range(K_RUNS):
        lo, hi, q_base, q_len, q_start, k_base, k_len, k_start, stride = load_row(rows_ptr, q_run * K_RUNS + k_run)
        begin, end = keys_seen(i, extents_ptr, batch, S, lo, hi, q_base, q_len, k_len, k_start, stride)
        m1 = tl.minimum(m0 + BLOCK_Q, q_len)
        first, last, whole_first, whole_last = tiles_in_band(m0, m1, lo, hi, k_len, BLOCK_K)
        if extents_ptr is not None:
            first, last, whole_first, whole_last = tiles_in_extents(
                first, last, whole_first, whole_last, begin, end, i < q_len, BLOCK_K
            )
        visited += last - first
        for t in range(last - first - (whole_last - whole_first)):
            acc = visit_keys(
                acc, q_tile, dout_tile, lse2, delta_tile, k_BTGD, v_BTGE, ceiling_BT, hidden_ptr, streams_BH,
                slope, inner, cap, threshold, rescale,
                partly_seen(t, first, whole_first, whole_last) * BLOCK_K, m0, begin, end, k_len, i, batch, head, T,
                q_start, k_base, k_start, stride,
                H, G, D, E, K_STRIDE, V_STRIDE, V_COLUMN,
                BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_E, True, CLEAN, ALIGNED, TMA, PRECISION,
            )  # fmt: skip
        for t in range(whole_first, whole_last):
            acc = visit_keys(
                acc, q_tile, dout_tile, lse2, delta_tile, k_BTGD, v_BTGE, ceiling_BT, hidden_ptr, streams_BH,
                slope, inner, cap, threshold, rescale,
                t * BLOCK_K, m0, begin, end, k_len, i, batch, head, T,
                q_start, k_base, k_start, stride,
                H, G, D, E, K_STRIDE, V_STRIDE, V_COLUMN,
                BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_E, False, CLEAN, ALIGNED, TMA, PRECISION,
            )  # fmt: skip

    if FIRST or LAST or visited > 0:
        d = tl.arange(0, BLOCK_D)
        at = ((batch.to(tl.int64) * S + q_run * slot + i) * H + head)[:, None] * D + d[None, :]
        inside = (i < slot)[:, None] & (d[None, :] < D)
        acc *= scale
        if not FIRST:
            acc += tl.load(dq_in_BSHD + at, mask=inside, other=0.0)
        tl.store(dq_BSHD + at, acc.to(dq_BSHD.dtype.element_ty), mask=inside)


@triton.jit
def visit_keys(
    acc, q_tile, dout_tile, lse2, delta_tile, k_BTGD, v_BTGE, ceiling_BT, hidden_ptr, streams_BH,
    slope, inner, cap, threshold, rescale,
    key, query, begin, end, k_len, i, batch, head, T, q_start, k_base, k_start, stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, V_COLUMN: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    MASKED: tl.constexpr, CLEAN: tl.constexpr, ALIGNED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc with the part of the keys of one tile, from key ``key`` of the run on; the tile's first query is ``query``."""
    ACCURATE: tl.constexpr = q_tile.dtype == tl.float32
    j = key + tl.arange(0, BLOCK_K)
    group = head // (H // G)
    k_tile = load_tile(k_BTGD, batch, T, k_base + key, group, k_len - key, G, K_STRIDE, 0, D, BLOCK_K, BLOCK_D, MASKED, TMA)
    v_tile = load_tile(
        v_BTGE, batch, T, k_base + key, group, k_len - key, G, V_STRIDE, V_COLUMN, E, BLOCK_K, BLOCK_E, MASKED, TMA
    )
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    s, t = scores(products, i[:, None], j[None, :], slope, inner, cap, q_start, k_start, stride, ACCURATE)
    if ceiling_BT is not None:  # noqa: SIM102 (known when compiled)
        if MASKED or some_hidden(hidden_ptr, batch, T, k_base + key, BLOCK_K, 16):
            s = under_ceiling(s, ceiling_BT, batch, T, k_base, j, k_len)
    p = tl.exp2(s - lse2[:, None])
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
    if streams_BH is not None:
        q_pos, k_pos = q_start + stride * i, k_start + stride * j
        q_first, k_first = q_start + stride * query, k_start + stride * key
        stream = tl.load(streams_BH + batch * H + head)
        keep = kept(stream, threshold, q_pos, k_pos, q_first, k_first, BLOCK_Q, BLOCK_K, ALIGNED, False)
        dp = tl.where(keep, dp * rescale, 0.0)
    ds = p * (dp - delta_tile[:, None])
    if cap is not None:
        ds *= 1.0 - t * t
    if MASKED:
        visible = (j[None, :] >= begin[:, None]) & (j[None, :] < end[:, None])
        ds = tl.where(visible, ds, 0.0)
        if CLEAN > 0:
            k_tile = keep_seen(k_tile, visible, CLEAN == 2)
    return add_product(acc, ds.to(k_tile.dtype), k_tile, T, PRECISION)
