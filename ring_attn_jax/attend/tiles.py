"""The tiles of a call: which queries meet which keys, which of them see each other, and what their scores are.

Shapes as in blockwise.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.dropout import rescale
from ring_attn_core.kernels.tile_sizes import blockwise_tiles, visible_tiles
from ring_attn_core.runs import Row

from .dropout import kept, streams
from .keys import Keys, unpack
from .score import Score


class BatchRows(NamedTuple):
    """So many batch rows from the first on."""

    first: jax.Array | int
    count: int


class Tile(NamedTuple):
    """Tokens ``index`` of a run (local indices), of which only those ``valid`` are this tile's to read as data."""

    run: jax.Array
    base: jax.Array
    index: jax.Array
    valid: jax.Array
    first: jax.Array
    end: jax.Array
    batch: BatchRows

    @classmethod
    def of(
        cls, run: jax.Array, base: jax.Array, length: jax.Array, tile: jax.Array, slot: int, block: int, batch: BatchRows
    ) -> Tile:
        """Tile number ``tile``, of ``block`` tokens, of a run of ``length`` tokens in a slot of ``slot`` tokens at ``base``."""
        first = tile * block
        begin = jnp.minimum(first, slot - block)
        index = begin + jnp.arange(block, dtype=jnp.int32)
        valid = (index >= first) & (index < length)
        return cls(run, base + begin, index, valid, first, jnp.minimum(first + block, length), batch)

    def load(self, x: jax.Array, groups: int, valid_only: bool = True) -> jax.Array:
        """[b n heads ...] -> [b groups heads/groups block ...] in the accumulation dtype, what is not valid as 0."""
        tile = self.tokens_of(x)
        tile = tile.astype(accumulation_dtype(x.dtype))
        if valid_only:
            tile = jnp.where(self.valid.reshape(1, -1, *[1] * (x.ndim - 2)), tile, 0)
        tile = tile.reshape(*tile.shape[:2], groups, -1, *tile.shape[3:])
        return jnp.moveaxis(tile, 1, 3)

    def tokens_of(self, x: jax.Array) -> jax.Array:
        """[b n ...] -> [batch rows of the tile, block ...], as they stand."""
        return lax.dynamic_slice(x, self.start(x), (self.batch.count, self.index.size, *x.shape[2:]))

    def start(self, x: jax.Array) -> list[jax.Array]:
        """The index of the tile's first element in ``x`` [b n ...], in one integer dtype, as dynamic slices want it."""
        return [jnp.int32(i) for i in (self.batch.first, self.base, *[0] * (x.ndim - 2))]

    def store(self, x: jax.Array, tile: jax.Array) -> jax.Array:
        """``x`` with the tile written back."""
        tile = jnp.moveaxis(tile, 3, 1)
        tile = tile.reshape(*tile.shape[:2], x.shape[2], *tile.shape[4:])
        return lax.dynamic_update_slice(x, tile, self.start(x))

    def add(self, x: jax.Array, tile: jax.Array) -> jax.Array:
        """``x`` with the tile added."""
        return self.store(x, self.load(x, x.shape[2], valid_only=False) + tile)


@dataclass(frozen=True)
class Part:
    """What a call works on; ``seen`` bool [b t] is the key mask, ``streams`` [b h] are the keys by which dropout draws."""

    q: jax.Array
    kv: jax.Array
    seen: jax.Array | None
    rows: jax.Array
    score: Score
    streams: jax.Array | None

    @classmethod
    def of(cls, q: jax.Array, keys: Keys, rows: jax.Array, score: Score) -> Part:
        draws = None if score.dropout_seed is None else streams(score.dropout_seed, q.shape[0], q.shape[2])
        return cls(q, keys.kv, unpack(keys), rows, score, draws)

    @property
    def groups(self) -> int:
        return self.kv.shape[2]

    @property
    def slots(self) -> tuple[int, int]:
        """Tokens in a slot of queries and of keys."""
        return self.q.shape[1] // self.rows.shape[0], self.kv.shape[1] // self.rows.shape[1]

    @property
    def batch_rows(self) -> int:
        """How many batch rows walk over the same tiles."""
        return self.q.shape[0] if self.score.extents is None else 1

    @cached_property
    def blocks(self) -> tuple[int, int]:
        return blockwise_tiles(self.batch_rows * self.q.shape[2], *self.slots)

    @property
    def query_tiles(self) -> int:
        return self.q.shape[0] // self.batch_rows * self.rows.shape[0] * -(-self.slots[0] // self.blocks[0])

    def query_tile(self, index: jax.Array) -> Tile:
        index = jnp.asarray(index, jnp.int32)  # 64 bits of a loop's counter under x64 go with no row
        tiles = -(-self.slots[0] // self.blocks[0])
        batch, run, tile = index // (tiles * self.rows.shape[0]), index // tiles % self.rows.shape[0], index % tiles
        row = self.row(run, 0)
        return Tile.of(run, row.q_base, row.q_len, tile, self.slots[0], self.blocks[0], BatchRows(batch, self.batch_rows))

    def row(self, q_run: jax.Array, k_run: jax.Array | int) -> Row:
        return Row(*jnp.unstack(self.rows[q_run, k_run]))

    def over_keys(self, queries: Tile, key_tile, state):  # type: ignore[no-untyped-def]
        """Thread ``state`` through ``key_tile(pair, state)`` for every key tile of which the queries see something."""
        block_k = self.blocks[1]

        def key_run(k_run: jax.Array, state):  # type: ignore[no-untyped-def]
            k_run = jnp.asarray(k_run, jnp.int32)
            row = self.row(queries.run, k_run)
            begin, end = self.keys_within_extents(queries, row)
            first, last = visible_tiles(queries.first, queries.end, row.lo, row.hi, begin, end, block_k)

            def pair(tile: jax.Array) -> Pair:
                keys = Tile.of(k_run, row.k_base, row.k_len, tile, self.slots[1], block_k, queries.batch)
                return Pair(self, queries, keys, row)

            return lax.fori_loop(first, last, lambda tile, state: key_tile(pair(tile), state), state)

        return lax.fori_loop(0, self.rows.shape[1], key_run, state)

    def keys_within_extents(self, queries: Tile, row: Row) -> tuple[jax.Array | int, jax.Array]:
        """First and end of the keys of a run, in local indices, between the least and the greatest position that they see."""
        if self.score.extents is None:
            return 0, row.k_len
        first, end = self.extents(queries)
        some = queries.valid[None] & (first < end)
        least = jnp.where(some, first, jnp.iinfo(jnp.int32).max).min()
        greatest = jnp.where(some, end, 0).max()
        begin, end = (jnp.clip(-((row.k_start - x) // row.stride), 0, row.k_len) for x in (least, greatest))
        return begin, end

    def extents(self, queries: Tile) -> tuple[jax.Array, jax.Array]:
        """First and end [1 block_q] of what the queries may see, int32 and not negative."""
        assert self.score.extents is not None
        extents = jnp.maximum(queries.tokens_of(self.score.extents), 0)
        if extents.dtype.itemsize >= 4:
            extents = jnp.minimum(extents, jnp.iinfo(jnp.int32).max)
        first, end = jnp.unstack(extents.astype(jnp.int32), axis=-1)
        return first, end


@dataclass(frozen=True)
class Pair:
    """A tile of queries and a tile of keys: their scores, and what befalls them."""

    part: Part
    queries: Tile
    keys: Tile
    row: Row

    def load_kv(self) -> tuple[jax.Array, jax.Array]:
        """The k and the v of the tile [b g block_k d or e]; 0 for keys that no query of the tile sees, whatever stands there."""
        tile = self.keys.load(self.part.kv, self.part.groups, valid_only=False)[:, :, 0]
        tile = zero_unless(self.visible.any(-2)[:, :, 0, :, None], tile)
        d = self.part.q.shape[-1]
        return tile[..., :d], tile[..., d:]

    def queries_that_see(self, tile: jax.Array) -> jax.Array:
        """A tile [b g r block_q width], 0 for queries that see no key of the tile, whatever stands there."""
        return zero_unless(self.visible.any(-1)[..., None], tile)

    def scores(self, q_tile: jax.Array, k_tile: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """(scores [b g r block_q block_k] before anything is hidden, the tanh in them under softcap)."""
        scores, tanh = dot("bgrqd,bgkd->bgrqk", q_tile, k_tile), None
        if self.part.score.softcap is not None:
            tanh = jnp.tanh(scores / self.part.score.softcap)
            scores = tanh * self.part.score.softcap
        if self.part.score.alibi_slopes is not None:
            slopes = self.part.score.alibi_slopes.astype(scores.dtype).reshape(1, self.part.groups, -1, 1, 1)
            lag = (self.k_pos[None] - self.q_pos[:, None]).astype(scores.dtype)
            scores = scores + slopes * lag[None, None, None]
        return scores, tanh

    def drop(self, p: jax.Array) -> jax.Array:
        """``z_ij p_ij``: 0 where dropout does not keep it, else scaled up."""
        if self.kept is None:
            return p
        return jnp.where(self.kept.reshape(p.shape), p * rescale(self.part.score.dropout_rate), 0)

    @cached_property
    def kept(self) -> jax.Array | None:
        """bool [b h block_q block_k], None without dropout."""
        if self.part.streams is None:
            return None
        mine = lax.dynamic_slice_in_dim(self.part.streams, *self.queries.batch)
        return kept(mine, self.part.score.dropout_rate, self.q_pos, self.k_pos)

    @cached_property
    def visible(self) -> jax.Array:
        """bool [b or 1, 1, 1, block_q, block_k]: which keys each query sees, among the tokens that are these tiles' own."""
        lag = self.queries.index[:, None] - self.keys.index[None]
        visible = (lag >= self.row.lo) & (lag <= self.row.hi) & self.queries.valid[:, None] & self.keys.valid[None]
        visible = visible[None]
        if self.part.score.extents is not None:
            first, end = (x[..., None] for x in self.part.extents(self.queries))
            k_pos = self.k_pos[None, None]
            visible &= (k_pos >= first) & (k_pos < end)
        if self.part.seen is not None:
            visible &= self.keys.tokens_of(self.part.seen)[:, None]
        return visible[:, None, None]

    @property
    def q_pos(self) -> jax.Array:
        """int32 [block_q]: global positions."""
        return self.row.q_start + self.row.stride * self.queries.index

    @property
    def k_pos(self) -> jax.Array:
        """int32 [block_k]: global positions."""
        return self.row.k_start + self.row.stride * self.keys.index


def valid_queries(rows: jax.Array, tokens: int) -> jax.Array:
    """bool [tokens]: which slots of the query shard are no padding."""
    row = Row(*jnp.unstack(rows[:, 0, :, None], axis=1))
    index = jnp.arange(tokens, dtype=jnp.int32)[None]
    return ((index >= row.q_base) & (index < row.q_base + row.q_len)).any(0)


def zero_unless(seen: jax.Array, tile: jax.Array) -> jax.Array:
    """``tile`` with 0 where it is not ``seen``. Most tiles are seen in whole: a branch spares them the pass, 5 % of the time."""
    return lax.cond(seen.all(), lambda: tile, lambda: jnp.where(seen, tile, 0))


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float64 for float64, float32 for everything else."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
