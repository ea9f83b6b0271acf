"""Attention of given shards in plain torch, tile by tile: for CPU, and the ground truth at any length.

The online softmax of FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2), continued from the (out, lse) of the keys
seen so far. Key tiles outside the band are never visited, and no score matrix is larger than one tile per head.

Shapes     q [b s h d], kv [b t g d+e] (k then v on the last dimension), rows [q_runs][k_runs] of Row;
           state out [b s h e], lse [b s h]. b batch, s/t tokens in the q/k shard, h/g query/key heads, d/e head dim of q,k / of v
Tiles      a tile lies within one run; r query heads that share a key head stand side by side: [b*g, r*block_q, ...]
Precision  float32 throughout (float64 for float64 inputs), whatever the input dtype: exact products on every device
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn_core.kernels.tiles import blockwise_tiles, visible_tiles
from ring_attn_core.runs import Row

State = tuple[Tensor, Tensor]
Rows = list[list[Row]]
LOG2E = math.log2(math.e)


def attend(q: Tensor, kv: Tensor, rows: Rows, scale: float, total: State) -> State:
    """``total`` (out, lse) over the keys seen so far -> the same with the keys of ``kv`` that ``rows`` make visible.

    Updates ``total`` in place and returns it.
    """
    out, lse = total
    d = q.shape[-1]
    for queries in _query_tiles(q, kv, rows):
        q_tile = queries.load(q).mul_(scale)
        acc, m = queries.load(out), queries.load(lse)
        l = (m > -math.inf).to(m.dtype)
        for keys, hidden in _key_tiles(q, kv, rows, queries):
            kv_tile = keys.load(kv)
            scores = torch.bmm(q_tile, kv_tile[..., :d].transpose(1, 2))
            _hide(scores, hidden, -math.inf)
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            m_finite = m_new.masked_fill(m_new == -math.inf, 0)
            p = _exp_(scores.sub_(m_finite))
            decay = _exp_(m - m_finite)
            l.mul_(decay).add_(p.sum(-1, keepdim=True))
            acc.mul_(decay).baddbmm_(p, kv_tile[..., d:])
            m = m_new
        queries.store(out, acc.div_(l.masked_fill(l == 0, 1)))
        queries.store(lse, m + l.log())
    return out, lse


def attend_backward(
    q: Tensor, kv: Tensor, rows: Rows, scale: float, lse: Tensor, delta: Tensor, dout: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """One pass over the tiles: (dq with these keys' part added in place, dkv of these keys from this rank's queries).

    p_ij = exp(s_ij - lse_i); dv_j = sum_i p_ij dout_i; ds_ij = p_ij (dout_i . v_j - delta_i);
    dq_i = scale sum_j ds_ij k_j; dk_j = scale sum_i ds_ij q_i
    """
    d = q.shape[-1]
    dkv = kv.new_zeros(kv.shape, dtype=dq.dtype)
    for queries in _query_tiles(q, kv, rows):
        q_tile = queries.load(q).mul_(scale)
        dout_tile, lse_tile, delta_tile = queries.load(dout), queries.load(lse), queries.load(delta)
        dq_tile = torch.zeros_like(q_tile)
        for keys, hidden in _key_tiles(q, kv, rows, queries):
            kv_tile = keys.load(kv)
            k_tile, v_tile = kv_tile[..., :d], kv_tile[..., d:]
            p = _exp_(torch.bmm(q_tile, k_tile.transpose(1, 2)).sub_(lse_tile))
            _hide(p, hidden, 0.0)
            ds = torch.bmm(dout_tile, v_tile.transpose(1, 2)).sub_(delta_tile).mul_(p)
            dq_tile.baddbmm_(ds, k_tile)
            keys.add(dkv[..., :d], torch.bmm(ds.transpose(1, 2), q_tile))
            keys.add(dkv[..., d:], torch.bmm(p.transpose(1, 2), dout_tile))
        queries.add(dq, dq_tile.mul_(scale))
    return dq, dkv


class _Tile(NamedTuple):
    """Tokens ``first .. end - 1`` of a run (local indices) that begins at ``base`` in its shard; heads in ``groups``."""

    run: int
    base: int
    first: int
    end: int
    groups: int

    def of(self, x: Tensor) -> Tensor:
        """[b n heads ...] -> a view [b groups heads/groups block width] of the tile."""
        tile = x[:, self.base + self.first : self.base + self.end].unflatten(2, (self.groups, -1))
        return (tile if x.ndim == 4 else tile.unsqueeze(-1)).permute(0, 2, 3, 1, 4)

    def load(self, x: Tensor) -> Tensor:
        """[b n heads ...] -> a copy [b*groups, heads/groups * block, width] in the accumulation dtype."""
        tile = self.of(x)
        b, g, r, block, width = tile.shape
        copy = torch.empty((b * g, r * block, width), dtype=accumulation_dtype(x.dtype), device=x.device)
        copy.view(tile.shape).copy_(tile)
        return copy

    def store(self, x: Tensor, tile: Tensor) -> None:
        view = self.of(x)
        view.copy_(tile.view(view.shape))

    def add(self, x: Tensor, tile: Tensor) -> None:
        view = self.of(x)
        view.add_(tile.view(view.shape))


def _query_tiles(q: Tensor, kv: Tensor, rows: Rows) -> Iterator[_Tile]:
    block_q, _ = _blocks(q, kv, rows)
    for run, (row, *_) in enumerate(rows):
        for first in range(0, row.q_len, block_q):
            yield _Tile(run, row.q_base, first, min(first + block_q, row.q_len), kv.shape[2])


def _key_tiles(q: Tensor, kv: Tensor, rows: Rows, queries: _Tile) -> Iterator[tuple[_Tile, Tensor | None]]:
    """The key tiles that ``queries`` see, each with the bool [block_q, block_k] of what the band hides, None where nothing."""
    _, block_k = _blocks(q, kv, rows)
    for run, row in enumerate(rows[queries.run]):
        first, end = visible_tiles(queries.first, queries.end, row.lo, row.hi, row.k_len, block_k)
        for j0 in range(first * block_k, end * block_k, block_k):
            keys = _Tile(run, row.k_base, j0, min(j0 + block_k, row.k_len), kv.shape[2])
            yield keys, _hidden(queries, keys, row, kv.device)


def _hidden(queries: _Tile, keys: _Tile, row: Row, device: torch.device) -> Tensor | None:
    if queries.first - (keys.end - 1) >= row.lo and queries.end - 1 - keys.first <= row.hi:
        return None
    i = torch.arange(queries.first, queries.end, device=device)[:, None]
    lag = i - torch.arange(keys.first, keys.end, device=device)
    return (lag < row.lo) | (lag > row.hi)


def _hide(scores: Tensor, hidden: Tensor | None, value: float) -> None:
    """Write ``value`` into scores [b*g, r*block_q, block_k] where ``hidden``."""
    if hidden is not None:
        scores.unflatten(1, (-1, hidden.shape[0])).masked_fill_(hidden, value)


def _exp_(x: Tensor) -> Tensor:
    """e to the power of ``x`` in place, as a power of 2: on a CPU torch's exp takes 3 times as long, 30 where it underflows."""
    return x.mul_(LOG2E).exp2_()


def _blocks(q: Tensor, kv: Tensor, rows: Rows) -> tuple[int, int]:
    return blockwise_tiles(q.shape[0] * q.shape[2], q.shape[1] // len(rows), kv.shape[1] // len(rows[0]))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.promote_types(dtype, torch.float32)
