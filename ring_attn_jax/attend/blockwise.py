"""Tiled attention of one q shard over one k/v shard in plain jnp, for CPU and TPU, and as the ground truth at any length.

    s_ij  = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)      if i may see j, else -inf
    lse_i = log sum_j exp(s_ij)                                                  with sinks, add the head's exp(sink) to the sum
    out_i = sum_j z_ij exp(s_ij - lse_i) v_j                                     z_ij = 1 / (1 - dropout_rate), 0 if dropped

This is the online softmax of FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2). It starts from the state over the keys seen
so far, with lse as row max, exp(rest) as row sum and out * exp(rest) as accumulator (rest: the rounding error of lse). Key tiles
outside of the band (the mask ``lo <= q_pos - k_pos <= hi``) or of the extents are skipped. No score matrix is larger than one
tile for each batch row and head.

Shapes     q [b s h d], keys.kv [b t g d+e] (k then v) or [b t g d] (v in k), rows int32 [q_runs, k_runs, fields];
           state out [b s h e], lse and rest [b s h]. b: batch, s and t: tokens in the q and k shard, h and g: query and key
           heads, d: head dim of q and k, e: head dim of v
Tiles      a run is an arithmetic progression of token positions; a slot is the part of a shard for one run. The slots of a shard
           have equal length; but in a balanced layout a slot extends from its run's first token to the end of the shard. A tile
           lies within one slot, and all tiles of a slot have the same length. The last tile ends with the slot, so it may
           overlap the previous tile: the tokens of the overlap are marked invalid in the last tile, so each token counts once.
           With extents or key extents each batch row visits its own key tiles; otherwise all batch rows visit the same tiles
           together
Precision  float32 throughout (float64 for float64 inputs), whatever the input dtype; matrix products too, on every device
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.runs import Row

from .backend import sink_gradient
from .keys import Keys
from .score import Score
from .state import Arrived, BackwardInputs, Gradients, State, carries_rest, rest_of
from .tiles import Pair, TileInputs, accumulation_dtype, dot


@dataclass(frozen=True)
class Blockwise:
    """The backend "blockwise": plain jnp, tile by tile. ``even``: slots are equal. ``v_dim``: columns of k that are values."""

    two_arrays: ClassVar[bool] = False
    even: bool = True
    v_dim: int | None = None

    def attend(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State | None, last: bool) -> State:
        v_dim = keys.kv.shape[-1] - q.shape[-1] if self.v_dim is None else self.v_dim
        state = attend(q, keys, rows, score, nothing(q, v_dim, rows, score) if total is None else total, even=self.even)
        return state._replace(out=state.out.astype(q.dtype)) if last else state

    def backward_inputs(
        self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State, dtotal: State
    ) -> BackwardInputs:
        (out, lse, rest), (dout, dlse, _) = total, dtotal
        seen = lse > -jnp.inf
        dout, dlse = jnp.where(seen[..., None], dout, 0), jnp.where(seen, dlse, 0)
        # einsum, since XLA's sum on a CPU allocates five arrays of out's size and takes 35 times as long (jax 0.10.2)
        row_sums = jnp.einsum("bshe,bshe->bsh", dout.astype(lse.dtype), out.astype(lse.dtype), precision=lax.Precision.HIGHEST)
        if score.sinks is not None:  # out 0 adds nothing to the sinks' gradient, even if dout is NaN
            row_sums = jnp.where(out.any(-1), row_sums, 0)
        delta = row_sums - dlse
        dsinks = sink_gradient(score, total, delta)
        if rest is not None:
            dout, delta = dout * jnp.exp(-rest)[..., None], delta * jnp.exp(-rest)
        return BackwardInputs(q, dout, lse, delta, dsinks)

    def attend_backward(
        self, query: BackwardInputs, keys: Keys, rows: jax.Array, score: Score, dq: jax.Array | None, arrived: Arrived, last: bool
    ) -> tuple[jax.Array, Gradients]:
        total = jnp.zeros_like(query.q, dtype=accumulation_dtype(query.q.dtype)) if dq is None else dq
        total, dkv = attend_backward(query, keys, rows, score, total, even=self.even)
        before = arrived()
        return total, dkv if before is None else before + dkv


def nothing(q: jax.Array, v_dim: int, rows: jax.Array, score: Score) -> State:
    """Return the initial state: out is 0, lse the sink of the head, or -inf for padding and without sinks."""
    b, s, h, _ = q.shape
    dtype = accumulation_dtype(q.dtype)
    out = jnp.zeros_like(q, shape=(b, s, h, v_dim), dtype=dtype)
    lse = jnp.full_like(q, -jnp.inf, shape=(b, s, h), dtype=dtype)
    if score.sinks is not None:
        lse = jnp.where(valid_queries(rows, s)[None, :, None], score.sinks.astype(dtype)[None, None], lse)
    return State(out, lse, jnp.zeros_like(lse) if carries_rest(q.dtype) else None)


def valid_queries(rows: jax.Array, tokens: int) -> jax.Array:
    """Return bool [tokens]: True at tokens of the query shard, False at padding."""
    row = Row(*jnp.unstack(rows[:, 0, :, None], axis=1))
    index = jnp.arange(tokens, dtype=jnp.int32)[None]
    return ((index >= row.q_base) & (index < row.q_base + row.q_len)).any(0)


@partial(jax.jit, static_argnames="even")  # traced once for all steps of a ring
def attend(q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State, *, even: bool = True) -> State:
    """Merge attention to the visible keys into ``total``, the state over the keys seen so far. Return the new state."""
    if q.size == 0 or keys.kv.size == 0:
        return total
    inputs = TileInputs.of(q, keys, rows, replace(score, own_keys=None), even)

    def query_tile(index: jax.Array, total: State) -> State:
        queries = inputs.query_tile(index)
        q_tile = queries.load(q, inputs.groups) * score.scale
        out, lse, *rest = (queries.load(x, inputs.groups, valid_only=False) for x in total.arrays)
        row_sum = (lse > -jnp.inf).astype(lse.dtype)
        if rest:
            row_sum = row_sum * jnp.exp(rest[0])
            out = out * row_sum[..., None]

        def key_tile(pair: Pair, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, l, m = state
            k_tile, v_tile = pair.load_kv(acc.shape[-1])
            scores = jnp.where(pair.visible, pair.scores(q_tile, k_tile)[0], -jnp.inf)
            m_new = jnp.maximum(m, scores.max(-1))
            m_finite = jnp.where(m_new == -jnp.inf, 0, m_new)
            p = jnp.exp(scores - m_finite[..., None])
            decay = jnp.exp(m - m_finite)
            acc = acc * decay[..., None] + dot("bgrqk,bgke->bgrqe", pair.drop(p), v_tile)
            return acc, l * decay + p.sum(-1), m_new

        acc, l, m = inputs.over_keys(queries, key_tile, (out, row_sum, lse))
        out = acc / jnp.where(l == 0, 1, l)[..., None]
        lse = m + jnp.log(l)
        tiles = (out, lse, rest_of(m, jnp.log(l), lse)) if rest else (out, lse)
        return State(*map(queries.store, total.arrays, tiles))

    return lax.fori_loop(0, inputs.query_tiles, query_tile, total)


@partial(jax.jit, static_argnames="even")
def attend_backward(
    query: BackwardInputs, keys: Keys, rows: jax.Array, score: Score, dq: jax.Array, *, even: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Return ``dq`` plus the gradient of q from these keys, and dkv, that of ``keys.kv``.

        p_ij = exp(s_ij - lse_i); dv_j = sum_i z_ij p_ij dout_i; ds_ij = p_ij (z_ij dout_i . v_j - delta_i) (1 - tanh^2);
        dq_i = scale sum_j ds_ij k_j; dk_j = scale sum_i ds_ij q_i

    The dropout factor z_ij is 1 / (1 - dropout_rate), or 0 if dropped; tanh is tanh(scale q_i . k_j / softcap), or 0 without
    softcap. The caller has multiplied dout and delta by exp(-rest_i) (``State``).
    """
    q, dout, lse, delta, *_ = query
    dkv = jnp.zeros_like(keys.kv, dtype=dq.dtype)
    if q.size == 0 or keys.kv.size == 0:
        return dq, dkv
    inputs = TileInputs.of(q, keys, rows, score, even)

    def query_tile(index: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dq, dkv = gradients
        queries = inputs.query_tile(index)
        q_tile = queries.load(q, inputs.groups) * score.scale
        dout_tile, lse_tile, delta_tile = (queries.load(x, inputs.groups) for x in (dout, lse, delta))

        def key_tile(pair: Pair, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq_tile, dkv = state
            k_tile, v_tile = pair.load_kv(dout.shape[-1])
            q_visible, dout_visible = pair.queries_that_see(q_tile), pair.queries_that_see(dout_tile)
            scores, tanh = pair.scores(q_visible, k_tile)
            p = jnp.where(pair.visible, jnp.exp(scores - lse_tile[..., None]), 0)
            dp = pair.drop(dot("bgrqe,bgke->bgrqk", dout_visible, v_tile)) - delta_tile[..., None]
            ds = jnp.where(pair.visible, p * dp if tanh is None else p * dp * (1 - tanh * tanh), 0)
            dk_tile, dv_tile = dot("bgrqk,bgrqd->bgkd", ds, q_visible), dot("bgrqk,bgrqe->bgke", pair.drop(p), dout_visible)
            dq_tile = dq_tile + score.scale * dot("bgrqk,bgkd->bgrqd", ds, k_tile)
            return dq_tile, pair.keys.add(dkv, jnp.concatenate([dk_tile, dv_tile], -1)[:, :, None])

        dq_tile, dkv = inputs.over_keys(queries, key_tile, (queries.load(dq, inputs.groups, valid_only=False), dkv))
        return queries.store(dq, dq_tile), dkv

    return lax.fori_loop(0, inputs.query_tiles, query_tile, (dq, dkv))
