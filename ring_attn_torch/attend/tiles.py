"""The tiles of a call: the pairs of query and key tiles to visit, their masks and their scores.

A run is an arithmetic progression of positions. Shapes: b batch rows, s and t tokens in the q and the k shard, h and g query and
key heads, r = h / g, d head dim of q and k, e head dim of v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_attn_core.dropout import rescale
from ring_attn_core.kernels.tile_sizes import blockwise_tiles, visible_tiles
from ring_attn_core.runs import Row

from .dropout import keep_mask, philox_keys
from .keys import Keys, unpack
from .score import Score

Rows = tuple[tuple[Row, ...], ...]
"""A ``Row`` for each pair of runs: ``rows[q_run][k_run]``."""


class Tile(NamedTuple):
    """A tile of tokens ``first .. end - 1`` of a run, counted from token ``base`` of the shard. ``groups``: kv heads."""

    run: int
    base: int
    first: int
    end: int
    groups: int

    @property
    def tokens(self) -> slice:
        return slice(self.base + self.first, self.base + self.end)

    def of(self, x: Tensor) -> Tensor:
        """Return the tile of ``x`` [b n heads width] or [b n heads] as a view [b, groups, heads / groups, tokens, width or 1]."""
        tile = x[:, self.tokens].unflatten(2, (self.groups, -1))
        return (tile if x.ndim == 4 else tile.unsqueeze(-1)).permute(0, 2, 3, 1, 4)

    def load(self, x: Tensor) -> Tensor:
        """Copy the tile ``of(x)`` to [b * groups, heads / groups * tokens, width or 1], in the accumulation dtype."""
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

    def holds(self, own: np.ndarray | None) -> bool:
        """Return whether this rank needs results of a token of the tile; ``own``: a field of ``Score``."""
        return own is None or bool(own[self.tokens].any())


@dataclass(frozen=True)
class TileInputs:
    """A set of batch rows that visit the same tiles, with the slices of the call's arrays. ``key_mask`` bool [b t];
    ``key_extents`` int64 [b t 2]: intervals of query positions; ``philox_keys`` [b h] of dropout."""

    batch: slice
    q: Tensor
    kv: Tensor
    key_mask: Tensor | None
    key_extents: Tensor | None
    rows: Rows
    score: Score
    philox_keys: Tensor | None

    @classmethod
    def all(cls, q: Tensor, keys: Keys, rows: Rows, score: Score) -> Iterator[TileInputs]:
        if q.numel() == 0 or keys.kv.numel() == 0:
            return
        key_mask = unpack(keys)
        dropout_keys = (
            None if score.dropout_seed is None else philox_keys(score.dropout_seed.to(q.device), q.shape[0], q.shape[2])
        )
        if score.extents is None and keys.extents is None:
            yield cls(slice(None), q, keys.kv, key_mask, None, rows, score, dropout_keys)
            return
        for b in range(q.shape[0]):
            batch = slice(b, b + 1)
            extents, key_extents = (None if x is None else x[batch].long() for x in (score.extents, keys.extents))
            some_key_mask, some_philox_keys = (None if x is None else x[batch] for x in (key_mask, dropout_keys))
            mine = score._replace(extents=extents)
            yield cls(batch, q[batch], keys.kv[batch], some_key_mask, key_extents, rows, mine, some_philox_keys)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return the batched matrix product of a and b in a buffer. Reuse the buffer for the same ``name`` and shape."""
        shape = name, a.shape[1], b.shape[2]
        if shape not in self._products:
            self._products[shape] = a.new_empty((a.shape[0], *shape[1:]))
        return torch.bmm(a, b, out=self._products[shape])

    @cached_property
    def _products(self) -> dict[tuple[str, int, int], Tensor]:
        return {}

    @cached_property
    def blocks(self) -> tuple[int, int]:
        score_rows = self.q.shape[0] * self.q.shape[2]
        return blockwise_tiles(score_rows, self.q.shape[1] // len(self.rows), self.kv.shape[1] // len(self.rows[0]))

    def query_tiles(self) -> Iterator[Tile]:
        block_q, _ = self.blocks
        for run, (row, *_) in enumerate(self.rows):
            for first in range(0, row.q_len, block_q):
                yield Tile(run, row.q_base, first, min(first + block_q, row.q_len), self.kv.shape[2])

    def pairs(self, queries: Tile) -> Iterator[Pair]:
        """Yield a ``Pair`` of the query tile ``queries`` and each key tile that may hold a key visible to these queries."""
        _, block_k = self.blocks
        for run, row in enumerate(self.rows[queries.run]):
            begin, end = self.keys_within_extents(queries, row)
            first, last = visible_tiles(queries.first, queries.end, row.lo, row.hi, begin, end, block_k)
            for j0 in range(first * block_k, last * block_k, block_k):
                if self.reached(queries, run, j0, row):
                    yield Pair(self, queries, Tile(run, row.k_base, j0, min(j0 + block_k, row.k_len), self.kv.shape[2]), row)

    def reached(self, queries: Tile, run: int, first: int, row: Row) -> bool:
        """Return True if a key extent of the key tile from index ``first`` of run ``run`` may contain a query of ``queries``."""
        if self.key_extents is None:
            return True
        least, greatest = self._key_reach[run, first]
        start, end = (row.q_start + row.stride * i for i in (queries.first, queries.end - 1))
        return least <= end and start < greatest

    def keys_within_extents(self, queries: Tile, row: Row) -> tuple[int, int]:
        """Return the smallest range (first, end) of indices in the key run that covers the extents of all ``queries``."""
        if self.score.extents is None:
            return 0, row.k_len
        least, greatest = self._reach[queries.run, queries.first]
        begin, end = (min(max(-((row.k_start - x) // row.stride), 0), row.k_len) for x in (least, greatest))
        return begin, end

    @cached_property
    def _reach(self) -> dict[tuple[int, int], tuple[int, int]]:
        assert self.score.extents is not None
        return reach_of(self.score.extents, list(self.query_tiles()))

    @cached_property
    def _key_reach(self) -> dict[tuple[int, int], tuple[int, int]]:
        assert self.key_extents is not None
        _, block = self.blocks
        tiles = [
            Tile(run, row.k_base, first, min(first + block, row.k_len), self.kv.shape[2])
            for run, row in enumerate(self.rows[0])
            for first in range(0, row.k_len, block)
        ]
        return reach_of(self.key_extents, tiles)


def reach_of(extents: Tensor, tiles: list[Tile]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return {(tile.run, tile.first): (least start, greatest end)} of nonempty ``extents`` [b n 2], read in one transfer."""
    if not tiles:
        return {}
    first, end = extents.unbind(-1)
    empty = first >= end
    first, end = first.masked_fill(empty, torch.iinfo(torch.int64).max), end.masked_fill(empty, 0)
    reach = [torch.stack([first[:, tile.tokens].min(), end[:, tile.tokens].max()]) for tile in tiles]
    return {(tile.run, tile.first): tuple(span) for tile, span in zip(tiles, torch.stack(reach).tolist(), strict=True)}


@dataclass(frozen=True)
class Pair:
    inputs: TileInputs
    queries: Tile
    keys: Tile
    row: Row

    def load_kv(self, v_dim: int) -> tuple[Tensor, Tensor]:
        """Copy k [b*g, block_k, d] and v [b*g, block_k, v_dim] of the key tile, 0 if no query sees them: they may be NaN."""
        tile = self.keys.load(self.inputs.kv)
        if self.masked is not None:
            unused = self.masked.all(1)
            tile.view(-1, self.keys.groups, *tile.shape[1:]).masked_fill_(unused[:, None, :, None], 0)
        d = self.inputs.q.shape[-1]
        begin = 0 if tile.shape[-1] == d else d  # 0: the values are columns of k
        return tile[..., :d], tile[..., begin : begin + v_dim]

    def queries_that_see(self, tile: Tensor) -> Tensor:
        """Return ``tile`` [b*g, r*block_q, width] with 0 at queries that see no key of the key tile: it may hold NaN there."""
        if self.fully_masked is None:
            return tile
        per_head = tile.view(self.inputs.q.shape[0], -1, self.fully_masked.shape[1], tile.shape[-1])
        return per_head.masked_fill(self.fully_masked[:, None, :, None], 0).view(tile.shape)

    def scores(self, q_tile: Tensor, k_tile: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return unmasked scores [b*g, r*block_q, block_k] and tanh(scale q . k / softcap). Without softcap the tanh is None."""
        scores, tanh = self.inputs.product("scores", q_tile, k_tile.transpose(1, 2)), None
        if self.inputs.score.softcap is not None:
            tanh = scores.div_(self.inputs.score.softcap).tanh_()
            scores = tanh * self.inputs.score.softcap
        if self.inputs.score.alibi_slopes is not None:
            slopes = self.inputs.score.alibi_slopes.to(scores.dtype)
            self._by_head(scores).add_(slopes[:, None, None] * (self.k_pos - self.q_pos[:, None]))
        return scores, tanh

    def hide(self, scores: Tensor, value: float) -> Tensor:
        if self.masked is not None:
            self._by_head(scores).masked_fill_(self.masked[:, None], value)
        return scores

    def drop_(self, p: Tensor) -> Tensor:
        if self.keep_mask is not None:
            self._by_head(p).mul_(self.keep_mask).mul_(rescale(self.inputs.score.dropout_rate))
        return p

    @cached_property
    def keep_mask(self) -> Tensor | None:
        if self.inputs.philox_keys is None:
            return None
        return keep_mask(self.inputs.philox_keys, self.inputs.score.dropout_rate, self.q_pos, self.k_pos)

    @cached_property
    def masked(self) -> Tensor | None:
        """Return the pair's mask, bool [b or 1, block_q, block_k], True for hidden, or None if nothing hides a key."""
        parts = []
        least, greatest = self.queries.first - (self.keys.end - 1), self.queries.end - 1 - self.keys.first
        if least < self.row.lo or greatest > self.row.hi:
            i = torch.arange(self.queries.first, self.queries.end, device=self.inputs.q.device)[:, None]
            lag = i - torch.arange(self.keys.first, self.keys.end, device=self.inputs.q.device)
            parts.append(((lag < self.row.lo) | (lag > self.row.hi))[None])
        if self.inputs.score.extents is not None:
            first, end = self.inputs.score.extents[:, self.queries.tokens, None].unbind(-1)
            parts.append((self.k_pos < first) | (self.k_pos >= end))
        if self.inputs.key_extents is not None:
            first, end = self.inputs.key_extents[:, None, self.keys.tokens].unbind(-1)
            parts.append((self.q_pos[:, None] < first) | (self.q_pos[:, None] >= end))
        if self.inputs.key_mask is not None:
            parts.append(~self.inputs.key_mask[:, None, self.keys.tokens].expand(-1, self.queries.end - self.queries.first, -1))
        return None if not parts else parts[0] if len(parts) == 1 else torch.stack(torch.broadcast_tensors(*parts)).any(0)

    @cached_property
    def fully_masked(self) -> Tensor | None:
        return None if self.masked is None else self.masked.all(2)

    @cached_property
    def q_pos(self) -> Tensor:
        i = torch.arange(self.queries.first, self.queries.end, device=self.inputs.q.device)
        return self.row.q_start + self.row.stride * i

    @cached_property
    def k_pos(self) -> Tensor:
        j = torch.arange(self.keys.first, self.keys.end, device=self.inputs.q.device)
        return self.row.k_start + self.row.stride * j

    def _by_head(self, scores: Tensor) -> Tensor:
        """View scores [b*g, r*block_q, block_k] as [b h block_q block_k]."""
        b, _, h, _ = self.inputs.q.shape
        return scores.view(b, h, self.queries.end - self.queries.first, -1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
