"""The gradient of one rank's queries over one k/v shard, in Triton (sm_80 and later).

    p_ij  = exp2(s_ij - lse2_i)                                    s_ij, lse2_i: score and lse of forward.py in base 2
    dp_ij = z_ij dout_i . v_j                                      z_ij = kept / (1 - dropout_rate)
    ds_ij = p_ij (dp_ij - delta_i) (1 - t_ij^2)                    t_ij: the tanh of softcap; without it the last factor is 1
    dq_i  = scale sum_j ds_ij k_j                                  delta_i = out_i . dout_i - dlse_i

One pass over the keys that a tile of queries sees, with probabilities recomputed from lse (FlashAttention-2,
arXiv:2307.08691, algorithm 2).

Shapes     q_BSHD, dout_BSHE, k_BTGD, v_BTGE, lse2_BHS and delta_BHS f32 (backward_sums.py) -> dq_BSHD. For the letters and the
           other arrays see forward.py
Program    one (q tile, query head, batch row), as in forward.py
State      FIRST: dq starts at 0; else at dq_in (f32), which dq may overwrite in place. If no k tile lies in the band and extents
           of a q tile, its dq is written only in the FIRST and the LAST step. In the LAST step, dq gets the input's dtype
Precision  products in the input dtype, sums in f32; ds is rounded once to the input dtype
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .dropout import keep_mask_of_tile
from .loads import add_product, keep_seen, load_own_tile, load_tile, some_hidden, under_key_mask
from .records import Columns, KernelArguments, KernelConstants, KeyRun, QueryTile
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
from .scores import scores


class QueryValues(NamedTuple):
    """The values of a query tile that each key tile needs: q, dout, and ``lse2`` and ``delta`` per query."""

    q: Any
    dout: Any
    lse2: Any
    delta: Any


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
    key_extents_ptr,
    key_mask_BT,
    alibi_slopes_ptr,
    dropout_BH,
    key_mask_spans_ptr,
    dq_in_BSHD,
    dq_BSHD,
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
    LAST: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dq of one query tile."""
    sizes: tl.constexpr = KernelConstants(
        H, G, BLOCK_Q, BLOCK_K,
        Columns(H, D, 0, D, BLOCK_D, TMA), Columns(H, E, 0, E, BLOCK_E, TMA),
        Columns(G, K_STRIDE, 0, D, BLOCK_D, TMA), Columns(G, V_STRIDE, V_COLUMN, E, BLOCK_E, TMA),
        None, ZERO_MASKED, ALIGNED, PRECISION, None,
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
    token = q_run * q_slot + m0

    q_tile = load_own_tile(q_BSHD, batch, S, token, head, q_slot - m0, sizes.Q, BLOCK_Q)
    dout_tile = load_own_tile(dout_BSHE, batch, S, token, head, q_slot - m0, sizes.DOUT, BLOCK_Q)
    at_sums = (batch * H + head).to(tl.int64) * S + q_run * q_slot + i
    lse2 = tl.load(lse2_BHS + at_sums, mask=i < q_slot, other=float("inf"))
    delta = tl.load(delta_BHS + at_sums, mask=i < q_slot, other=0.0)
    slope = None if alibi_slopes_ptr is None else tl.load(alibi_slopes_ptr + head).to(tl.float32)
    loaded = QueryValues(q_tile, dout_tile, lse2, delta)
    tile = QueryTile(batch, head, m0, i, slope)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    visited = 0
    for k_run in range(K_RUNS):
        row = load_row(rows_ptr, q_run * K_RUNS + k_run)
        begin, end = keys_seen(i, extents_ptr, batch, S, row)
        tiles = tiles_in_band(m0, tl.minimum(m0 + BLOCK_Q, row.q_len), row.lo, row.hi, row.k_len, BLOCK_K)
        if extents_ptr is not None:
            tiles = tiles_in_extents(tiles, begin, end, i < row.q_len, BLOCK_K)
        run = KeyRun(row, begin, end)
        visited += tiles.last - tiles.first
        for t in range(count_partly_seen(tiles)):
            n0 = partly_seen(t, tiles) * BLOCK_K
            if key_extents_ptr is None or some_query_sees(n0, run, tile, args, sizes):
                acc = visit_keys(acc, loaded, n0, run, tile, args, sizes, True)
        for t in range(tiles.whole_first, tiles.whole_last):
            if key_extents_ptr is None or every_query_sees(t * BLOCK_K, run, tile, args, sizes):
                acc = visit_keys(acc, loaded, t * BLOCK_K, run, tile, args, sizes, False)
            elif some_query_sees(t * BLOCK_K, run, tile, args, sizes):
                acc = visit_keys(acc, loaded, t * BLOCK_K, run, tile, args, sizes, True)

    if FIRST or LAST or visited > 0:
        d = tl.arange(0, BLOCK_D)
        at = ((batch.to(tl.int64) * S + q_run * q_slot + i) * H + head)[:, None] * D + d[None, :]
        inside = (i < q_slot)[:, None] & (d[None, :] < D)
        acc *= scale
        if not FIRST:
            acc += tl.load(dq_in_BSHD + at, mask=inside, other=0.0)
        tl.store(dq_BSHD + at, acc.to(dq_BSHD.dtype.element_ty), mask=inside)


@triton.jit
def visit_keys(acc, loaded, n0, run, tile, args, sizes: tl.constexpr, MASKED: tl.constexpr):
    """Add the contribution of the key tile that begins at key ``n0`` to ``acc``, which is dq / scale, and return ``acc``."""
    ACCURATE: tl.constexpr = loaded.q.dtype == tl.float32
    row = run.row
    j = n0 + tl.arange(0, sizes.BLOCK_K)
    group = tile.head // (sizes.H // sizes.G)
    k_tile = load_tile(args.k, tile.batch, args.T, row.k_base + n0, group, row.k_len - n0, sizes.K, sizes.BLOCK_K, MASKED)
    v_tile = load_tile(args.v, tile.batch, args.T, row.k_base + n0, group, row.k_len - n0, sizes.V, sizes.BLOCK_K, MASKED)
    products = tl.dot(loaded.q, tl.trans(k_tile), input_precision=sizes.PRECISION)
    s, t = scores(products, tile.i[:, None], j[None, :], tile.slope, row, args, ACCURATE)
    if args.key_mask is not None:  # noqa: SIM102 (known when compiled)
        if MASKED or some_hidden(args.key_mask_spans, tile.batch, args.T, row.k_base + n0, sizes.BLOCK_K):
            s = under_key_mask(s, args.key_mask, tile.batch, args.T, row.k_base, j, row.k_len)
    p = tl.exp2(s - loaded.lse2[:, None])
    dp = tl.dot(loaded.dout, tl.trans(v_tile), input_precision=sizes.PRECISION)
    if args.dropout is not None:
        keep = keep_mask_of_tile(args, tile.batch, tile.head, row, tile.i, j, tile.m0, n0, sizes, False)
        dp = tl.where(keep, dp * args.rescale, 0.0)
    ds = p * (dp - loaded.delta[:, None])
    if args.softcap is not None:
        ds *= 1.0 - t * t
    if MASKED:
        visible = sees(j, run, tile, args)
        ds = tl.where(visible, ds, 0.0)
        if sizes.ZERO_MASKED > 0:
            k_tile = keep_seen(k_tile, visible, sizes.ZERO_MASKED == 2)
    return add_product(acc, ds.to(k_tile.dtype), k_tile, args.T, sizes.PRECISION)
