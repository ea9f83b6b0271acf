"""Forward attention of one rank's queries over one k/v shard, in Triton (sm_80 and later).

    s_ij  = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)     where query i may see key j, else -inf
    lse_i = log sum_j exp(s_ij)           natural log; -inf where the query sees no key, its sink where it has one
    out_i = sum_j z_ij exp(s_ij - lse_i) v_j                                    z_ij = kept / (1 - dropout_rate)

One pass over the keys with the online softmax of FlashAttention-2 (arXiv:2307.08691, algorithm 1). The result is merged, in the
epilogue, with the (out, lse) of the keys seen so far: with weights exp(lse - lse_both) it is exactly what one softmax over all of
them would give.

Shapes     q_BSHD, k_BTGD, v_BTGE, rows int32 [q_runs, k_runs, fields], extents int32 [B, S, 2], ceiling_BT f32 of the
           key mask, sinks, slopes f32 [H], streams uint32 [B, H] -> out_BSHE, lse_BSH f32
           B batch, S/T tokens in the q/k shard, H/G query/key heads (G divides H), D/E head dim of q, k / of v
Program    one (q tile, query head, batch row), tiles fastest and the last of a shard first, which under a causal mask is the
           heaviest; a q tile lies within one run
K tiles    every query sees one interval of every run (rows.keys_seen); tiles outside all of them are not visited, and
           those inside all of them need no mask
State      FIRST: nothing has been seen; else out_in f32 and lse_in, which out and lse may overwrite in place. A q tile that
           sees nothing here writes only at the first step and at the LAST, where out gets the input's dtype
Precision  products in the input dtype, sums and softmax in f32, in base 2; probabilities are rounded once to the input dtype
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import kept
from .loads import add_product, keep_seen, load_own_tile, load_tile, some_hidden, under_ceiling
from .rows import keys_seen, load_row, partly_seen, tiles_in_band, tiles_in_extents
from .scores import scores

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def forward(
    q_BSHD,
    k_BTGD,
    v_BTGE,
    rows_ptr,
    extents_ptr,
    ceiling_BT,
    hidden_ptr,
    sinks_ptr,
    slopes_ptr,
    streams_BH,
    out_in_BSHE,
    lse_in_BSH,
    out_BSHE,
    lse_BSH,
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
    FOLDED: tl.constexpr,
    CLEAN: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head).to(tl.float32)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    visited = 0
    q_len = 0
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
            acc, m, l = visit(
                acc, m, l, q_tile, k_BTGD, v_BTGE, ceiling_BT, hidden_ptr, streams_BH, slope, inner, cap, threshold,
                partly_seen(t, first, whole_first, whole_last) * BLOCK_K, m0, begin, end, k_len, i, batch, head, T,
                q_start, k_base, k_start, stride,
                H, G, D, E, K_STRIDE, V_STRIDE, V_COLUMN,
                BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_E, True, FOLDED, CLEAN, ALIGNED, TMA, PRECISION,
            )  # fmt: skip
        for t in range(whole_first, whole_last):
            acc, m, l = visit(
                acc, m, l, q_tile, k_BTGD, v_BTGE, ceiling_BT, hidden_ptr, streams_BH, slope, inner, cap, threshold,
                t * BLOCK_K, m0, begin, end, k_len, i, batch, head, T,
                q_start, k_base, k_start, stride,
                H, G, D, E, K_STRIDE, V_STRIDE, V_COLUMN,
                BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_E, False, FOLDED, CLEAN, ALIGNED, TMA, PRECISION,
            )  # fmt: skip

    if FIRST or LAST or visited > 0:
        valid = i < q_len
        l = tl.where(valid, l, 0.0)
        acc = tl.where(valid[:, None], acc, 0.0)
        if streams_BH is not None:
            acc *= rescale
        e = tl.arange(0, BLOCK_E)
        inside = i < slot
        at_lse = (batch.to(tl.int64) * S + q_run * slot + i) * H + head
        at_out = at_lse[:, None] * E + e[None, :]
        inside_out = inside[:, None] & (e[None, :] < E)
        here = m * LN2 + tl.log(tl.where(l > 0, l, 1.0))
        if FIRST and sinks_ptr is None:
            acc = acc / tl.where(l > 0, l, 1.0)[:, None]
            lse = tl.where(l > 0, here, float("-inf"))
        else:
            if FIRST:
                before = tl.where(valid, tl.load(sinks_ptr + head).to(tl.float32), float("-inf"))
            else:
                before = tl.load(lse_in_BSH + at_lse, mask=inside, other=float("-inf"))
            greater = tl.maximum(tl.where(l > 0, here, float("-inf")), before)
            greater = tl.where(greater == float("-inf"), 0.0, greater)
            w_here = tl.where(l > 0, tl.exp(here - greater), 0.0)
            w_before = tl.exp(before - greater)
            both = w_here + w_before
            acc *= (w_here / (tl.where(l > 0, l, 1.0) * tl.where(both > 0, both, 1.0)))[:, None]
            if not FIRST:
                out_in = tl.load(out_in_BSHE + at_out, mask=inside_out, other=0.0)
                acc += out_in * (w_before / tl.where(both > 0, both, 1.0))[:, None]
            lse = tl.where(l > 0, greater + tl.log(both), before)
        tl.store(out_BSHE + at_out, acc.to(out_BSHE.dtype.element_ty), mask=inside_out)
        tl.store(lse_BSH + at_lse, lse, mask=inside)


@triton.jit
def visit(
    acc, m, l, q_tile, k_BTGD, v_BTGE, ceiling_BT, hidden_ptr, streams_BH, slope, inner, cap, threshold,
    key, query, begin, end, k_len, i, batch, head, T, q_start, k_base, k_start, stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, V_COLUMN: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    MASKED: tl.constexpr, FOLDED: tl.constexpr, CLEAN: tl.constexpr,
    ALIGNED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc, m (in base 2) and l with the keys of one tile, from key ``key`` of the run on; the tile's first query is ``query``."""
    ACCURATE: tl.constexpr = q_tile.dtype == tl.float32
    j = key + tl.arange(0, BLOCK_K)
    group = head // (H // G)
    k_tile = load_tile(k_BTGD, batch, T, k_base + key, group, k_len - key, G, K_STRIDE, 0, D, BLOCK_K, BLOCK_D, MASKED, TMA)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    # A positive scale goes into the exponential's multiply-add where nothing else needs the scores.
    if FOLDED and cap is None and slope is None:
        s, factor = products, inner
    else:
        s, _ = scores(products, i[:, None], j[None, :], slope, inner, cap, q_start, k_start, stride, ACCURATE)
        factor = 1.0
    if MASKED:
        visible = (j[None, :] >= begin[:, None]) & (j[None, :] < end[:, None])
        s = tl.where(visible, s, float("-inf"))
    if ceiling_BT is not None:  # noqa: SIM102 (known when compiled)
        if MASKED or some_hidden(hidden_ptr, batch, T, k_base + key, BLOCK_K, 16):
            s = under_ceiling(s, ceiling_BT, batch, T, k_base, j, k_len)
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    if MASKED or ceiling_BT is not None:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        shift = m_new
    p = tl.exp2(s * factor - shift[:, None])
    decay = tl.exp2(m - shift)
    l = l * decay + tl.sum(p, 1)
    # Not before the product, though it knows nothing of the scores: booleans would be packed until here, by 250 instructions.
    if streams_BH is not None:
        q_pos, k_pos = q_start + stride * i, k_start + stride * j
        q_first, k_first = q_start + stride * query, k_start + stride * key
        stream = tl.load(streams_BH + batch * H + head)
        keep = kept(stream, threshold, q_pos, k_pos, q_first, k_first, BLOCK_Q, BLOCK_K, ALIGNED, False)
        p = tl.where(keep, p, 0.0)
    v_tile = load_tile(
        v_BTGE, batch, T, k_base + key, group, k_len - key, G, V_STRIDE, V_COLUMN, E, BLOCK_K, BLOCK_E, MASKED, TMA
    )
    if MASKED and CLEAN > 0:
        v_tile = keep_seen(v_tile, visible, CLEAN == 2)
    acc = add_product(acc * decay[:, None], p.to(v_tile.dtype), v_tile, T, PRECISION)
    return acc, m_new, l
