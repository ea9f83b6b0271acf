"""Tiled attention of one q shard over one k/v shard in plain torch, for any device, and as the ground truth.

    s_ij  = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)      if i may see j, else -inf
    lse_i = log sum_j exp(s_ij)                                                  with sinks, add the head's exp(sink) to the sum
    out_i = sum_j z_ij exp(s_ij - lse_i) v_j                                     z_ij = 1 / (1 - dropout_rate), 0 if dropped

This is the online softmax of FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2). It starts from the state over the keys seen
so far, with lse as row max, exp(rest) as row sum and out * exp(rest) as accumulator (rest: the rounding error of lse). Key tiles
outside of the band (the mask ``lo <= q_pos - k_pos <= hi``) or of the extents are skipped. No score matrix is larger than one
tile for each batch row and head.

Shapes     q [b s h d], keys.kv [b t g d+e] (k then v on the last dimension) or [b t g d] (v in k), rows [q_runs][k_runs] of Row;
           state out [b s h e], lse and rest [b s h]. b: batch, s and t: tokens in the q and k shard, h and g: query and key
           heads, d: head dim of q and k, e: head dim of v
Tiles      a run is an arithmetic progression of token positions, and a tile lies within one run. The r query heads of a key
           head share one matrix product, which has r * block_q rows: [b*g, r*block_q, ...]. With extents or key extents each
           batch row visits its own key tiles; otherwise all batch rows visit the same tiles together
Precision  float32 throughout (float64 for float64 inputs), whatever the input dtype
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .backend import sink_gradient
from .keys import Keys
from .score import Score
from .state import Arrived, BackwardInputs, Gradients, State, carries_rest, rest_of
from .tiles import Rows, TileInputs, accumulation_dtype

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Blockwise:
    """The backend "blockwise": plain torch, tile by tile. ``v_dim``: the values are this many first columns of k, unless None."""

    two_arrays: ClassVar[bool] = False
    v_dim: int | None = field(default=None, kw_only=True)

    def attend(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State | None, last: bool) -> State:
        v_dim = keys.kv.shape[-1] - q.shape[-1] if self.v_dim is None else self.v_dim
        state = self.merged(q, keys, rows, score, nothing(q, v_dim, rows, score) if total is None else total)
        return state._replace(out=state.out.to(q.dtype)) if last else state

    def backward_inputs(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State, dtotal: State) -> BackwardInputs:
        (out, lse, rest), (dout, dlse, _) = total, dtotal
        unseen = lse == -math.inf
        dout, dlse = dout.masked_fill(unseen[..., None], 0), dlse.masked_fill(unseen, 0)
        row_sums = torch.sum(dout.to(lse.dtype) * out.to(lse.dtype), -1)
        if score.sinks is not None:  # out 0 adds nothing to the sinks' gradient, even if dout is NaN
            row_sums = row_sums.masked_fill(~out.any(-1), 0)
        delta = row_sums - dlse
        dsinks = sink_gradient(score, total, delta)
        if rest is not None:
            factor = torch.exp(-rest)
            dout, delta = dout.mul_(factor[..., None]), delta.mul_(factor)
        return BackwardInputs(q, dout, lse, delta, dsinks, out=out)

    def attend_backward(
        self, query: BackwardInputs, keys: Keys, rows: Rows, score: Score, dq: Tensor | None, arrived: Arrived, last: bool
    ) -> tuple[Tensor, Gradients]:
        dq = query.q.new_zeros(query.q.shape, dtype=accumulation_dtype(query.q.dtype)) if dq is None else dq
        dq, dkv = self.gradients(query, keys, rows, score, dq)
        before = arrived()
        return dq, dkv if before is None else dkv.add_(before)

    def merged(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State) -> State:
        """Merge attention to the visible keys into ``total``, the state over the keys seen so far, in place. Return ``total``."""
        for inputs in TileInputs.all(q, keys, rows, score):
            out, lse, *rest = (x[inputs.batch] for x in total.arrays)
            for queries in inputs.query_tiles():
                if not queries.holds(score.own_queries):
                    continue
                q_tile = queries.load(inputs.q).mul_(score.scale)
                acc, before = queries.load(out), queries.load(lse)
                m, l = before, (before > -math.inf).to(before.dtype)
                if rest:
                    acc.mul_(l.mul_(queries.load(rest[0]).exp_()))
                for pair in inputs.pairs(queries):
                    k_tile, v_tile = pair.load_kv(out.shape[-1])
                    scores = pair.hide(pair.scores(q_tile, k_tile)[0], -math.inf)
                    m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
                    m_finite = m_new.masked_fill(m_new == -math.inf, 0)
                    p = _exp_(scores.sub_(m_finite))
                    decay = _exp_(m - m_finite)
                    l.mul_(decay).add_(p.sum(-1, keepdim=True))
                    acc.mul_(decay).baddbmm_(pair.drop_(p), v_tile)
                    m = m_new
                if m is not before:
                    queries.store(out, acc.div_(l.masked_fill(l == 0, 1)))
                    after = m + l.log()
                    queries.store(lse, after)
                    if rest:
                        queries.store(rest[0], rest_of(m, l.log(), after))
        return total

    def gradients(self, query: BackwardInputs, keys: Keys, rows: Rows, score: Score, dq: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of q from these keys to ``dq`` in place. Return ``dq``, and dkv: the gradient of ``keys.kv``.

            p_ij = exp(s_ij - lse_i); dv_j = sum_i z_ij p_ij dout_i; ds_ij = p_ij (z_ij dout_i . v_j - delta_i) (1 - tanh^2);
            dq_i = scale sum_j ds_ij k_j; dk_j = scale sum_i ds_ij q_i

        z_ij: 1 / (1 - dropout_rate), or 0 if dropped. delta_i = dout_i . out_i - dlse_i. tanh: tanh(scale q_i . k_j / softcap),
        or 0 without softcap. The caller has multiplied dout and delta by exp(-rest_i), if the state has a rest.
        """
        q, dout, lse, delta, *_ = query
        d = q.shape[-1]
        dkv = torch.zeros_like(keys.kv, dtype=dq.dtype)
        for inputs in TileInputs.all(q, keys, rows, score):
            dk, dv = dkv[inputs.batch].split([d, dkv.shape[-1] - d], -1)
            for queries in inputs.query_tiles():
                q_tile = queries.load(inputs.q).mul_(score.scale)
                dout_tile, lse_tile, delta_tile = (queries.load(x[inputs.batch]) for x in (dout, lse, delta))
                dq_tile = torch.zeros_like(q_tile)
                q_held = queries.holds(score.own_queries)
                for pair in inputs.pairs(queries):
                    k_held = pair.keys.holds(score.own_keys)
                    if not (q_held or k_held):
                        continue
                    k_tile, v_tile = pair.load_kv(dout.shape[-1])
                    q_visible, dout_visible, delta_visible = map(pair.queries_that_see, (q_tile, dout_tile, delta_tile))
                    scores, tanh = pair.scores(q_visible, k_tile)
                    p = pair.hide(_exp_(scores.sub_(lse_tile)), 0.0)
                    ds = pair.drop_(inputs.product("dp", dout_visible, v_tile.transpose(1, 2))).sub_(delta_visible).mul_(p)
                    if tanh is not None:
                        ds.addcmul_(ds * tanh, tanh, value=-1)
                    if q_held:
                        dq_tile.baddbmm_(ds, k_tile)
                    if k_held:
                        pair.keys.add(dk, inputs.product("dk", ds.transpose(1, 2), q_visible))
                        pair.keys.add(dv, inputs.product("dv", pair.drop_(p).transpose(1, 2), dout_visible))
                queries.add(dq[inputs.batch], dq_tile.mul_(score.scale))
        return dq, dkv


def nothing(q: Tensor, v_dim: int, rows: Rows, score: Score) -> State:
    """Return the initial state: out 0, and lse the head's sink; -inf without sinks, and for queries that are padding."""
    b, s, h, _ = q.shape
    dtype = accumulation_dtype(q.dtype)
    out, lse = q.new_zeros((b, s, h, v_dim), dtype=dtype), q.new_full((b, s, h), -math.inf, dtype=dtype)
    if score.sinks is not None:
        for row, *_ in rows:
            lse[:, row.q_base : row.q_base + row.q_len] = score.sinks
    return State(out, lse, torch.zeros_like(lse) if carries_rest(q.dtype) else None)


def _exp_(x: Tensor) -> Tensor:
    """Compute exp(x) in place as a power of 2, since torch's exp is slower on CPUs, most of all if it underflows. The base
    changes after the max or lse is subtracted: a key that outweighs all others has x = 0 and a probability of exactly 1."""
    return x.mul_(LOG2E).exp2_()
