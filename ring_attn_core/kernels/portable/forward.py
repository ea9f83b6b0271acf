"""Forward attention of one rank's queries over one k/v shard, in Triton (sm_80 and later).

    s_ij  = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)     if query i sees key j, else -inf
    lse_i = log sum_j exp(s_ij)           natural log; -inf if the query sees no key
    out_i = sum_j z_ij exp(s_ij - lse_i) v_j                                    z_ij = kept / (1 - dropout_rate)

One pass over the keys with the online softmax of FlashAttention-2 (arXiv:2307.08691, algorithm 1). The epilogue merges the result
with the (out, lse) of the keys seen so far, with weights exp(lse - lse_both): this equals one softmax over all of these keys. At
the first step it merges (0, sink) if there are sinks, so the stored lse counts the sink once. For inputs in f32 it also stores
rest_i, the rounding error of lse_i, and computes the weights from lse + rest.

Shapes     q_BSHD, k_BTGD, v_BTGE, rows int32 [q_runs, k_runs, fields], extents int32 [B, S, 2], key_extents int32
           [B, T, 2], key_mask_BT f32 (loads.py), sinks, alibi_slopes f32 [H], dropout uint32 [B, H] -> out_BSHE, lse_BSH f32
           and, for inputs in f32, rest_BSH f32
           B batch, S/T tokens in the q/k shard, H/G query/key heads (G divides H), D/E head dim of q, k / of v
Program    one per (q tile, query head, batch row); a q tile lies within one run. As program ids increase, the q tile varies
           fastest, from the last of a shard to the first, because under a causal mask the last q tile has the most work
K tiles    by band and extent, a query sees one interval of each run of keys (rows.keys_seen). K tiles before or after the
           intervals of all queries of a q tile are not visited; k tiles inside each of these intervals need no mask. Key extents
           are tested for each k tile (rows.some_query_sees)
State      FIRST: no keys have been seen yet. Else out_in (f32), lse_in and rest_in hold the result for the keys seen so far, and
           out, lse and rest may overwrite them in place. If no k tile lies in the band and extents of a q tile, the program
           writes only in the FIRST and the LAST step. In the LAST step, out gets the input's dtype
Precision  products in the input dtype, sums and softmax in f32, in base 2; probabilities are rounded once to the input dtype;
           for inputs in f32, lse and rest of this shard are computed in f64 and merged in f32
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import keep_mask_of_tile
from .loads import add_product, keep_seen, load_own_tile, load_tile, some_hidden, under_key_mask
from .records import Columns, KernelArguments, KernelConstants, KeyRun, QueryTile, Tail
from .rows import (
    count_partly_seen,
    every_query_sees,
    keys_seen,
    load_row,
    partly_seen,
    sees,
    some_query_sees,
    tiles_in_band,
    tiles_in_extents,
)
from .scores import LN2, scores


@triton.jit
def forward(
    q_BSHD,
    q_tail_BSHD,
    k_BTGD,
    k_tail_BTGD,
    v_BTGE,
    rows_ptr,
    extents_ptr,
    key_extents_ptr,
    key_mask_BT,
    key_mask_spans_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    dropout_BH,
    out_in_BSHE,
    lse_in_BSH,
    rest_in_BSH,
    out_BSHE,
    lse_BSH,
    rest_BSH,
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
    BLOCK_TAIL: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    FOLDED: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    MAIN: tl.constexpr = E if BLOCK_TAIL else D  # pyright: ignore[reportAssignmentType]
    K_TAIL: tl.constexpr = Columns(G, K_STRIDE, E, D - E, BLOCK_TAIL, TMA)
    sizes: tl.constexpr = KernelConstants(
        H, G, BLOCK_Q, BLOCK_K,
        Columns(H, D, 0, MAIN, BLOCK_D, TMA), None,
        Columns(G, K_STRIDE, 0, MAIN, BLOCK_D, TMA), Columns(G, V_STRIDE, V_COLUMN, E, BLOCK_E, TMA),
        FOLDED, ZERO_MASKED, ALIGNED, PRECISION, K_TAIL,
    )  # fmt: skip
    args = KernelArguments(
        k_BTGD, v_BTGE, extents_ptr, key_extents_ptr, key_mask_BT, key_mask_spans_ptr, alibi_slopes_ptr, dropout_BH,
        inner, softcap, threshold, rescale, S, T,
    )  # fmt: skip
    q_slot = S // Q_RUNS
    tiles_of_run = tl.cdiv(q_slot, BLOCK_Q)
    program = tl.program_id(0)
    number = Q_RUNS * tiles_of_run - 1 - program % (Q_RUNS * tiles_of_run)
    head = program // (Q_RUNS * tiles_of_run) % H
    batch = program // (Q_RUNS * tiles_of_run) // H
    q_run = number // tiles_of_run
    m0 = number % tiles_of_run * BLOCK_Q
    i = m0 + tl.arange(0, BLOCK_Q)

    q_tile = load_own_tile(q_BSHD, batch, S, q_run * q_slot + m0, head, q_slot - m0, sizes.Q, BLOCK_Q)
    tail = None
    if BLOCK_TAIL:
        columns: tl.constexpr = Columns(H, D, E, D - E, BLOCK_TAIL, TMA)
        q_tail = load_own_tile(q_tail_BSHD, batch, S, q_run * q_slot + m0, head, q_slot - m0, columns, BLOCK_Q)
        tail = Tail(q_tail, k_tail_BTGD)
    slope = None if alibi_slopes_ptr is None else tl.load(alibi_slopes_ptr + head).to(tl.float32)
    tile = QueryTile(batch, head, m0, i, slope)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    visited = 0
    q_len = 0
    for k_run in range(K_RUNS):
        row = load_row(rows_ptr, q_run * K_RUNS + k_run)
        q_len = row.q_len
        begin, end = keys_seen(i, extents_ptr, batch, S, row)
        tiles = tiles_in_band(m0, tl.minimum(m0 + BLOCK_Q, q_len), row.lo, row.hi, row.k_len, BLOCK_K)
        if extents_ptr is not None:
            tiles = tiles_in_extents(tiles, begin, end, i < q_len, BLOCK_K)
        run = KeyRun(row, begin, end)
        visited += tiles.last - tiles.first
        for t in range(count_partly_seen(tiles)):
            n0 = partly_seen(t, tiles) * BLOCK_K
            if key_extents_ptr is None or some_query_sees(n0, run, tile, args, sizes):
                acc, m, l = visit_keys(acc, m, l, q_tile, tail, n0, run, tile, args, sizes, True)
        for t in range(tiles.whole_first, tiles.whole_last):
            if key_extents_ptr is None or every_query_sees(t * BLOCK_K, run, tile, args, sizes):
                acc, m, l = visit_keys(acc, m, l, q_tile, tail, t * BLOCK_K, run, tile, args, sizes, False)
            elif some_query_sees(t * BLOCK_K, run, tile, args, sizes):
                acc, m, l = visit_keys(acc, m, l, q_tile, tail, t * BLOCK_K, run, tile, args, sizes, True)

    if FIRST or LAST or visited > 0:
        valid = i < q_len
        l = tl.where(valid, l, 0.0)
        acc = tl.where(valid[:, None], acc, 0.0)
        if dropout_BH is not None:
            acc *= rescale
        e = tl.arange(0, BLOCK_E)
        inside = i < q_slot
        at_lse = (batch.to(tl.int64) * S + q_run * q_slot + i) * H + head
        at_out = at_lse[:, None] * E + e[None, :]
        inside_out = inside[:, None] & (e[None, :] < E)
        if rest_BSH is None:
            here = m * LN2 + tl.log(tl.where(l > 0, l, 1.0))
        else:
            exact = m.to(tl.float64) * LN2 + tl.log(tl.where(l > 0, l, 1.0))
            here = exact.to(tl.float32)
            rest = tl.where(l > 0, (exact - here.to(tl.float64)).to(tl.float32), 0.0)
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
            if rest_BSH is None:
                w_here = tl.where(l > 0, tl.exp(here - greater), 0.0)
                w_before = tl.exp(before - greater)
            else:
                rest_before = tl.zeros_like(rest)
                if not FIRST:
                    rest_before = tl.load(rest_in_BSH + at_lse, mask=inside, other=0.0)
                w_here = tl.where(l > 0, tl.exp(here - greater + rest), 0.0)
                w_before = tl.exp(before - greater + rest_before)
            both = w_here + w_before
            acc *= (w_here / (tl.where(l > 0, l, 1.0) * tl.where(both > 0, both, 1.0)))[:, None]
            if not FIRST:
                out_in = tl.load(out_in_BSHE + at_out, mask=inside_out, other=0.0)
                acc += out_in * (w_before / tl.where(both > 0, both, 1.0))[:, None]
            lse = tl.where(l > 0, greater + tl.log(both), before)
            if rest_BSH is not None:
                rest = tl.where(l > 0, (greater - lse) + tl.log(both), rest_before)
        tl.store(out_BSHE + at_out, acc.to(out_BSHE.dtype.element_ty), mask=inside_out)
        tl.store(lse_BSH + at_lse, lse, mask=inside)
        if rest_BSH is not None:
            tl.store(rest_BSH + at_lse, rest, mask=inside)


@triton.jit
def visit_keys(acc, m, l, q_tile, tail, n0, run, tile, args, sizes: tl.constexpr, MASKED: tl.constexpr):
    """Take one step of online softmax, for the key tile that begins at ``n0``. Return acc, row max m (base 2) and row sum l."""
    ACCURATE: tl.constexpr = q_tile.dtype == tl.float32
    row = run.row
    j = n0 + tl.arange(0, sizes.BLOCK_K)
    group = tile.head // (sizes.H // sizes.G)
    k_tile = load_tile(args.k, tile.batch, args.T, row.k_base + n0, group, row.k_len - n0, sizes.K, sizes.BLOCK_K, MASKED)
    if args.v is None and MASKED and sizes.ZERO_MASKED > 0:  # before the scores: the tile is not in registers during the softmax
        k_tile = keep_seen(k_tile, sees(j, run, tile, args), sizes.ZERO_MASKED == 2)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=sizes.PRECISION)
    if tail is not None:
        token, limit = row.k_base + n0, row.k_len - n0
        k_tail = load_tile(tail.k, tile.batch, args.T, token, group, limit, sizes.K_TAIL, sizes.BLOCK_K, MASKED)
        products = add_product(products, tail.q, tl.trans(k_tail), args.T, sizes.PRECISION)
    # A positive scale goes into the exponential's multiply-add if nothing else needs the scores.
    if sizes.FOLDED and args.softcap is None and tile.slope is None:
        s, factor = products, args.inner
    else:
        s, _ = scores(products, tile.i[:, None], j[None, :], tile.slope, row, args, ACCURATE)
        factor = 1.0
    if MASKED:
        visible = sees(j, run, tile, args)
        s = tl.where(visible, s, float("-inf"))
    if args.key_mask is not None:  # noqa: SIM102 (known when compiled)
        if MASKED or some_hidden(args.key_mask_spans, tile.batch, args.T, row.k_base + n0, sizes.BLOCK_K):
            s = under_key_mask(s, args.key_mask, tile.batch, args.T, row.k_base, j, row.k_len)
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    if MASKED or args.key_mask is not None:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        shift = m_new
    p = tl.exp2(s * factor - shift[:, None])
    decay = tl.exp2(m - shift)
    l = l * decay + tl.sum(p, 1)
    # The dropout mask does not depend on the scores, but if drawn before the product, its bools are packed by 250 instructions.
    if args.dropout is not None:
        p = tl.where(keep_mask_of_tile(args, tile.batch, tile.head, row, tile.i, j, tile.m0, n0, sizes, False), p, 0.0)
    if args.v is None:
        v_tile = k_tile
    else:
        v_tile = load_tile(args.v, tile.batch, args.T, row.k_base + n0, group, row.k_len - n0, sizes.V, sizes.BLOCK_K, MASKED)
    if args.v is not None and MASKED and sizes.ZERO_MASKED > 0:
        v_tile = keep_seen(v_tile, visible, sizes.ZERO_MASKED == 2)
    acc = add_product(acc * decay[:, None], p.to(v_tile.dtype), v_tile, args.T, sizes.PRECISION)
    return acc, m_new, l
