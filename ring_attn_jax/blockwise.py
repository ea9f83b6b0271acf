"""Attention of given shards in plain jnp, tile by tile: for CPU and TPU, and the ground truth at any length.

The online softmax of FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2), continued from the (out, lse) of the keys
seen so far. Key tiles outside the band are never visited, and no score matrix is larger than one tile per head.

Shapes     q [b s h d], kv [b t g d+e] (k then v on the last dimension), rows int32 [q_runs, k_runs, fields];
           state out [b s h e], lse [b s h]. b batch, s/t tokens in the q/k shard, h/g query/key heads, d/e head dim of q,k / of v
Tiles      a tile lies within one slot; the last one of a slot is moved back to end with it, and the rows that it shares
           with the tile before are left to that one
Precision  float32 throughout (float64 for float64 inputs), whatever the input dtype: exact products on every device
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.kernels.tiles import blockwise_tiles, visible_tiles
from ring_attn_core.runs import Row

State = tuple[jax.Array, jax.Array]


def attend(q: jax.Array, kv: jax.Array, rows: jax.Array, scale: float, total: State) -> State:
    """``total`` (out, lse) over the keys seen so far -> the same with the keys of ``kv`` that ``rows`` make visible."""
    if q.size == 0 or kv.size == 0:
        return total
    grid = _Grid.of(q, kv, rows)
    d = q.shape[-1]

    def query_tile(index: jax.Array, total: State) -> State:
        run, tile = index // grid.q_tiles, index % grid.q_tiles
        queries = _Tile.of(_run(rows, run, 0).q(), tile, grid.q_slot, grid.block_q)
        q_tile = queries.load(q, grid.groups) * scale
        out, lse = (queries.load(x, grid.groups, valid_only=False) for x in total)

        def key_tile(k_run: jax.Array, tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, l, m = state
            row = _run(rows, run, k_run)
            keys = _Tile.of(row.k(), tile, grid.k_slot, grid.block_k)
            kv_tile = keys.load(kv, grid.groups)[:, :, 0]
            scores = jnp.where(_visible(queries, keys, row), _dot("bgrqd,bgkd->bgrqk", q_tile, kv_tile[..., :d]), -jnp.inf)
            m_new = jnp.maximum(m, scores.max(-1))
            m_finite = jnp.where(m_new == -jnp.inf, 0, m_new)
            p = jnp.exp(scores - m_finite[..., None])
            decay = jnp.exp(m - m_finite)
            return acc * decay[..., None] + _dot("bgrqk,bgke->bgrqe", p, kv_tile[..., d:]), l * decay + p.sum(-1), m_new

        acc, l, m = _over_keys(grid, rows, run, queries, key_tile, (out, (lse > -jnp.inf).astype(lse.dtype), lse))
        out = acc / jnp.where(l == 0, 1, l)[..., None]
        return queries.store(total[0], out), queries.store(total[1], m + jnp.log(l))

    return lax.fori_loop(0, grid.q_runs * grid.q_tiles, query_tile, total)


def attend_backward(
    q: jax.Array, kv: jax.Array, rows: jax.Array, scale: float, lse: jax.Array, delta: jax.Array, dout: jax.Array, dq: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One pass over the tiles: (dq with these keys' part added, dkv of these keys from this rank's queries).

    p_ij = exp(s_ij - lse_i); dv_j = sum_i p_ij dout_i; ds_ij = p_ij (dout_i . v_j - delta_i);
    dq_i = scale sum_j ds_ij k_j; dk_j = scale sum_i ds_ij q_i
    """
    if q.size == 0 or kv.size == 0:
        return dq, jnp.zeros_like(kv, dtype=dq.dtype)
    grid = _Grid.of(q, kv, rows)
    d = q.shape[-1]

    def query_tile(index: jax.Array, grads: State) -> State:
        dq, dkv = grads
        run, tile = index // grid.q_tiles, index % grid.q_tiles
        queries = _Tile.of(_run(rows, run, 0).q(), tile, grid.q_slot, grid.block_q)
        q_tile = queries.load(q, grid.groups) * scale
        dout_tile, lse_tile, delta_tile = (queries.load(x, grid.groups) for x in (dout, lse, delta))

        def key_tile(k_run: jax.Array, tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq_tile, dkv = state
            row = _run(rows, run, k_run)
            keys = _Tile.of(row.k(), tile, grid.k_slot, grid.block_k)
            visible = _visible(queries, keys, row)
            kv_tile = keys.load(kv, grid.groups)[:, :, 0]
            k_tile, v_tile = kv_tile[..., :d], kv_tile[..., d:]
            scores = _dot("bgrqd,bgkd->bgrqk", q_tile, k_tile)
            p = jnp.where(visible, jnp.exp(scores - lse_tile[..., None]), 0)
            ds = jnp.where(visible, p * (_dot("bgrqe,bgke->bgrqk", dout_tile, v_tile) - delta_tile[..., None]), 0)
            dk_tile, dv_tile = _dot("bgrqk,bgrqd->bgkd", ds, q_tile), _dot("bgrqk,bgrqe->bgke", p, dout_tile)
            dq_tile = dq_tile + scale * _dot("bgrqk,bgkd->bgrqd", ds, k_tile)
            return dq_tile, keys.add(dkv, jnp.concatenate([dk_tile, dv_tile], -1)[:, :, None])

        dq_tile, dkv = _over_keys(grid, rows, run, queries, key_tile, (queries.load(dq, grid.groups, valid_only=False), dkv))
        return queries.store(dq, dq_tile), dkv

    return lax.fori_loop(0, grid.q_runs * grid.q_tiles, query_tile, (dq, jnp.zeros_like(kv, dtype=dq.dtype)))


class _Grid(NamedTuple):
    """The static sizes of a call."""

    groups: int
    q_runs: int
    q_slot: int
    q_tiles: int
    block_q: int
    k_runs: int
    k_slot: int
    block_k: int

    @classmethod
    def of(cls, q: jax.Array, kv: jax.Array, rows: jax.Array) -> _Grid:
        q_runs, k_runs = rows.shape[:2]
        q_slot, k_slot = q.shape[1] // q_runs, kv.shape[1] // k_runs
        block_q, block_k = blockwise_tiles(q.shape[0] * q.shape[2], q_slot, k_slot)
        return cls(kv.shape[2], q_runs, q_slot, -(-q_slot // block_q), block_q, k_runs, k_slot, block_k)


class _Run(Row):
    def q(self) -> tuple[jax.Array, jax.Array]:
        return self.q_base, self.q_len

    def k(self) -> tuple[jax.Array, jax.Array]:
        return self.k_base, self.k_len


def _run(rows: jax.Array, q_run: jax.Array, k_run: jax.Array | int) -> _Run:
    return _Run(*jnp.unstack(rows[q_run, k_run]))


class _Tile(NamedTuple):
    """Tokens ``index`` of a run (local indices), of which only those ``valid`` are this tile's to read as data."""

    base: jax.Array
    index: jax.Array
    valid: jax.Array
    first: jax.Array
    end: jax.Array

    @classmethod
    def of(cls, run: tuple[jax.Array, jax.Array], tile: jax.Array, slot: int, block: int) -> _Tile:
        base, length = run
        first = tile * block
        begin = jnp.minimum(first, slot - block)
        index = begin + jnp.arange(block)
        return cls(base + begin, index, (index >= first) & (index < length), first, jnp.minimum(first + block, length))

    def load(self, x: jax.Array, groups: int, valid_only: bool = True) -> jax.Array:
        """[b n heads ...] -> [b groups heads/groups block ...] in the accumulation dtype, what is not valid as 0."""
        tile = lax.dynamic_slice_in_dim(x, self.base, self.index.size, 1)
        tile = tile.astype(accumulation_dtype(x.dtype))
        if valid_only:
            tile = jnp.where(self.valid.reshape(1, -1, *[1] * (x.ndim - 2)), tile, 0)
        tile = tile.reshape(*tile.shape[:2], groups, -1, *tile.shape[3:])
        return jnp.moveaxis(tile, 1, 3)

    def store(self, x: jax.Array, tile: jax.Array) -> jax.Array:
        """``x`` with the tile written back."""
        tile = jnp.moveaxis(tile, 3, 1)
        tile = tile.reshape(*tile.shape[:2], x.shape[2], *tile.shape[4:])
        return lax.dynamic_update_slice_in_dim(x, tile, self.base, 1)

    def add(self, x: jax.Array, tile: jax.Array) -> jax.Array:
        """``x`` with the tile added."""
        return self.store(x, self.load(x, x.shape[2], valid_only=False) + tile)


def _visible(queries: _Tile, keys: _Tile, row: Row) -> jax.Array:
    """bool [block_q, block_k]: the band of ``row``, between the tokens that are these tiles' own."""
    lag = queries.index[:, None] - keys.index[None, :]
    return (lag >= row.lo) & (lag <= row.hi) & queries.valid[:, None] & keys.valid[None, :]


def _over_keys(grid: _Grid, rows: jax.Array, run: jax.Array, queries: _Tile, key_tile, state):  # type: ignore[no-untyped-def]
    """Thread ``state`` through ``key_tile(k_run, tile, state)`` for every key tile that the queries see."""

    def key_run(k_run: jax.Array, state):  # type: ignore[no-untyped-def]
        row = _run(rows, run, k_run)
        first, end = visible_tiles(queries.first, queries.end, row.lo, row.hi, row.k_len, grid.block_k)
        return lax.fori_loop(first, end, lambda tile, state: key_tile(k_run, tile, state), state)

    return lax.fori_loop(0, grid.k_runs, key_run, state)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float64 for float64, float32 for everything else."""
    return jnp.promote_types(dtype, jnp.float32)
