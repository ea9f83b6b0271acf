"""Inputs of the backward, in Triton: lse2 and delta of each query, and the bounds of each query tile's extents.

    lse2_i   = log2(e) (lse_i + rest_i)         rest_i: rounding error of lse_i, known only for inputs in f32, else 0
                                                +inf if lse_i is -inf (no visible key, no sink): then p_ij = 0
    delta_i  = out_i . dout_i - dlse_i          0 if lse_i is -inf
    factor_i = 2^-r_i                           r_i: rounding error of lse2_i; only for inputs in f32
    bounds   = least first, greatest end, greatest first, least end      of the extents (first, end) of a tile's queries

Shapes     out_BSHE, lse_BSH and rest_BSH f32, dout_BSHE, dlse_BSH f32 -> lse2_BHS, delta_BHS, factor_BHS f32; extents int32
           [B, S, 2], rows int32 [q_runs, k_runs, fields] -> bounds int32 [B, q tiles, 4], as token positions
Program    ``delta``: one (tile of tokens, head, batch row); ``extent_bounds``: one (q tile, batch row), a q tile within one run
Precision  f32; lse2 is computed in f64 if there is a rest
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import NOTHING_BEGINS, ROW_FIELDS
from .scores import LOG2E


@triton.jit
def delta(
    out_BSHE,
    lse_BSH,
    rest_BSH,
    dout_BSHE,
    dlse_BSH,
    lse2_BHS,
    delta_BHS,
    factor_BHS,
    S,
    H,
    E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Store lse2, delta and, with ``rest``, the factor of dout and delta, by the formulas on top of the file."""
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
    if rest_BSH is None:
        tl.store(lse2_BHS + to, tl.where(seen, lse * LOG2E, float("inf")), mask=inside)
    else:
        exact = (lse.to(tl.float64) + tl.load(rest_BSH + at, mask=seen, other=0.0)) * LOG2E
        lse2 = exact.to(tl.float32)
        tl.store(lse2_BHS + to, tl.where(seen, lse2, float("inf")), mask=inside)
        lost = (exact - lse2.to(tl.float64)).to(tl.float32)
        tl.store(factor_BHS + to, tl.where(seen, tl.exp2(-lost), 1.0), mask=inside)


@triton.jit
def extent_bounds(
    extents_ptr, rows_ptr, bounds_ptr, S, RUNS: tl.constexpr, ROW: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store four bounds of a tile's extents (first, end): the least first, greatest end, greatest first, and least end. An empty
    extent counts as (NOTHING_BEGINS, 0). ROW: ``runs.Row`` records from run to run in ``rows``. LENGTH: index of the field with a
    run's length."""
    slot = S // RUNS
    tiles = tl.cdiv(slot, BLOCK)
    program = tl.program_id(0)
    run = program // tiles % RUNS
    batch = (program // tiles // RUNS).to(tl.int64)
    i = program % tiles * BLOCK + tl.arange(0, BLOCK)
    valid = i < tl.load(rows_ptr + run * ROW * ROW_FIELDS + LENGTH)
    at = extents_ptr + (batch * S + run * slot + i) * 2
    first = tl.load(at, mask=valid, other=0)
    end = tl.load(at + 1, mask=valid, other=0)
    some = valid & (first < end)
    bounds = bounds_ptr + program.to(tl.int64) * 4
    tl.store(bounds, tl.min(tl.where(some, first, NOTHING_BEGINS), 0))
    tl.store(bounds + 1, tl.max(tl.where(some, end, 0), 0))
    tl.store(bounds + 2, tl.max(tl.where(valid, tl.where(some, first, NOTHING_BEGINS), 0), 0))
    tl.store(bounds + 3, tl.min(tl.where(valid, tl.where(some, end, 0), NOTHING_BEGINS), 0))
