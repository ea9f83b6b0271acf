"""Backward attention of one rank's queries over one k/v shard, in Triton (sm_80 and later): three kernels.

    p_ij = exp(s_ij - lse_i)             ds_ij = p_ij (z_ij dout_i . v_j - delta_i) (1 - tanh_ij^2)
    dv_j = sum_i z_ij p_ij dout_i        dk_j = scale sum_i ds_ij q_i        dq_i = scale sum_j ds_ij k_j
    delta_i = dout_i . out_i - dlse_i    z_ij = kept / (1 - dropout_rate)

``delta`` makes the sums of a query once per ring; ``dkv`` walks over the queries of a key tile and ``dq`` over the keys of a
query tile (FlashAttention-2, arXiv:2307.08691, algorithm 2, in two passes). Every sum has one order, so two runs give the same
bits; the price is two products more, 7 where one pass with atomic additions needs 5.

Shapes     as in triton_forward.py; dout_BSHE in the input dtype; lse2_BHS = lse log2(e), +inf where the query sees no key, and
           delta_BHS in f32; bounds int32 [B, q tiles, 4] in key positions: least and greatest that a tile's queries may see,
           and the part that all of them may
Program    dkv: one (k tile, key head, batch row), over all query heads of the group; dq: as the forward
Tiles      dkv holds its tile of scores transposed, [keys, queries], so that p and ds go into the products from registers
State      dk, dv, dq in f32 are added to what is given (FIRST: nothing), in place where the caller wants it; dq in the input
           dtype at the LAST step. Packed k/v have packed gradients: without dv_BTGE dv stands in dk's array from V_COLUMN on
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .triton_common import (
    LOG2E,
    NOTHING_BEGINS,
    ROW_FIELDS,
    add_product,
    keep_seen,
    kept,
    keys_seen,
    load_own_tile,
    load_row,
    load_tile,
    partly_seen,
    scores,
    some_hidden,
    tiles_in_band,
    tiles_in_extents,
    under_ceiling,
)

Q_LEN = tl.constexpr(3)
K_LEN = tl.constexpr(6)
SCAN = tl.constexpr(64)


@triton.jit
def delta(
    out_BSHE,
    lse_BSH,
    dout_BSHE,
    dlse_BSH,
    lse2_BHS,
    delta_BHS,
    S,
    H: tl.constexpr,
    E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """lse in base 2 and delta, heads before tokens; +inf and 0 for a query that sees nothing: its probabilities become 0."""
    program = tl.program_id(0)
    tiles = tl.cdiv(S, BLOCK_Q)
    head = program // tiles % H
    batch = (program // tiles // H).to(tl.int64)
    token = program % tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    e = tl.arange(0, BLOCK_E)
    at = (batch * S + token) * H + head
    inside = token < S
    lse = tl.load(lse_BSH + at, mask=inside, other=float("-inf"))
    seen = lse > float("-inf")
    here = seen[:, None] & (e[None, :] < E)
    out = tl.load(out_BSHE + at[:, None] * E + e[None, :], mask=here, other=0.0).to(tl.float32)
    dout = tl.load(dout_BSHE + at[:, None] * E + e[None, :], mask=here, other=0.0).to(tl.float32)
    dlse = tl.load(dlse_BSH + at, mask=seen, other=0.0)
    to = (batch * H + head) * S + token
    tl.store(delta_BHS + to, tl.sum(out * dout, 1) - dlse, mask=inside)
    tl.store(lse2_BHS + to, tl.where(seen, lse * LOG2E, float("inf")), mask=inside)


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


@triton.jit
def extent_bounds(extents_ptr, rows_ptr, bounds_ptr, S, Q_RUNS: tl.constexpr, K_RUNS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """For every q tile: least first and greatest end of its queries' extents, and greatest first and least end."""
    slot = S // Q_RUNS
    tiles = tl.cdiv(slot, BLOCK_Q)
    program = tl.program_id(0)
    run = program // tiles % Q_RUNS
    batch = (program // tiles // Q_RUNS).to(tl.int64)
    i = program % tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = i < tl.load(rows_ptr + run * K_RUNS * ROW_FIELDS + Q_LEN)
    at = extents_ptr + (batch * S + run * slot + i) * 2
    first = tl.load(at, mask=valid, other=0)
    end = tl.load(at + 1, mask=valid, other=0)
    some = valid & (first < end)
    bounds = bounds_ptr + program.to(tl.int64) * 4
    tl.store(bounds, tl.min(tl.where(some, first, NOTHING_BEGINS), 0))
    tl.store(bounds + 1, tl.max(tl.where(some, end, 0), 0))
    tl.store(bounds + 2, tl.max(tl.where(valid, tl.where(some, first, NOTHING_BEGINS), 0), 0))
    tl.store(bounds + 3, tl.min(tl.where(valid, tl.where(some, end, 0), NOTHING_BEGINS), 0))
