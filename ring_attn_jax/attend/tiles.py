"""The pairs of query and key tiles that a ring step visits, their masks and scores. blockwise.py explains shapes and slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.dropout import rescale
from ring_attn_core.kernels.tile_sizes import blockwise_tiles, visible_tiles
from ring_attn_core.runs import Row

from .dropout import keep_mask, philox_keys
from .keys import Keys, unpack
from .score import Score


class BatchRows(NamedTuple):
    """A range of batch rows: ``count`` rows that begin at row ``first``."""

    first: jax.Array | int
    count: int


class Tile(NamedTuple):
    """A tile: tokens ``first .. end - 1`` of run ``run``, counted from the run's start. A load always takes ``block`` tokens.

    ``base``: the first loaded token, as an index in the shard. ``index`` int32 [block]: each loaded token's index in the run.
    ``valid`` bool [block]: True at ``first .. end - 1``.
    """

    run: jax.Array
    base: jax.Array
    index: jax.Array
    valid: jax.Array
    first: jax.Array
    end: jax.Array
    batch: BatchRows

    @classmethod
    def of(
        cls, run: jax.Array, base: jax.Array, length: jax.Array, tile: jax.Array, slot: Any, block: int, batch: BatchRows
    ) -> Tile:
        """Build tile ``tile`` of ``run``. The run fills ``length`` of ``slot`` tokens of a slot that begins at index ``base``."""
        first = tile * block
        begin = jnp.minimum(first, slot - block)
        index = begin + jnp.arange(block, dtype=jnp.int32)
        valid = (index >= first) & (index < length)
        return cls(run, base + begin, index, valid, first, jnp.minimum(first + block, length), batch)

    def load(self, x: jax.Array, groups: int, valid_only: bool = True) -> jax.Array:
        """Return the tokens of ``x`` [b n heads ...] as [b groups heads/groups block ...]. ``valid_only``: 0 at invalid ones."""
        tile = self.tokens_of(x).astype(accumulation_dtype(x.dtype))
        if valid_only:
            tile = jnp.where(self.valid.reshape(1, -1, *[1] * (x.ndim - 2)), tile, 0)
        tile = tile.reshape(*tile.shape[:2], groups, -1, *tile.shape[3:])
        return jnp.moveaxis(tile, 1, 3)

    def tokens_of(self, x: jax.Array) -> jax.Array:
        """Slice the tile's batch rows and tokens from ``x``: [b n ...] -> [rows block ...]. Invalid tokens keep their values."""
        return lax.dynamic_slice(x, self.start(x), (self.batch.count, self.index.size, *x.shape[2:]))

    def start(self, x: jax.Array) -> list[jax.Array]:
        """Return the tile's start indices in ``x`` [b n ...], all int32, because a dynamic slice takes a single index dtype."""
        return [jnp.int32(i) for i in (self.batch.first, self.base, *[0] * (x.ndim - 2))]

    def store(self, x: jax.Array, tile: jax.Array) -> jax.Array:
        """Return ``x`` with the tile's tokens overwritten by ``tile``, which has the shape that ``load`` returns."""
        tile = jnp.moveaxis(tile, 3, 1)
        tile = tile.reshape(*tile.shape[:2], x.shape[2], *tile.shape[4:])
        return lax.dynamic_update_slice(x, tile, self.start(x))

    def add(self, x: jax.Array, tile: jax.Array) -> jax.Array:
        """Add ``tile``, in the shape that ``load`` returns, to ``x`` at all tokens that ``load`` takes. Return the sum."""
        return self.store(x, self.load(x, x.shape[2], valid_only=False) + tile)


@dataclass(frozen=True)
class TileInputs:
    """The inputs of one ring step, and the ranges of tiles to visit.

    ``key_mask`` [b t], ``key_extents`` [b t 2], ``philox_keys`` [b h]. ``even``: the shard has equal slots, one per run.
    """

    q: jax.Array
    kv: jax.Array
    key_mask: jax.Array | None
    key_extents: jax.Array | None
    rows: jax.Array
    score: Score
    philox_keys: jax.Array | None
    even: bool = True

    @classmethod
    def of(cls, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, even: bool = True) -> TileInputs:
        dropout_keys = None if score.dropout_seed is None else philox_keys(score.dropout_seed, q.shape[0], q.shape[2])
        return cls(q, keys.kv, unpack(keys), keys.extents, rows, score, dropout_keys, even)

    @property
    def groups(self) -> int:
        return self.kv.shape[2]

    @property
    def slots(self) -> tuple[int, int]:
        """Return the number of tokens of a query slot and of a key slot: the shard's tokens divided by its runs, rounded down."""
        return self.q.shape[1] // self.rows.shape[0], self.kv.shape[1] // self.rows.shape[1]

    @property
    def batch_rows(self) -> int:
        """Return the number of batch rows in a tile: 1 with extents or key extents, which differ from row to row, else all."""
        return self.q.shape[0] if self.score.extents is None and self.key_extents is None else 1

    @cached_property
    def blocks(self) -> tuple[int, int]:
        return blockwise_tiles(self.batch_rows * self.q.shape[2], *self.slots)

    @property
    def query_tiles(self) -> int:
        return self.q.shape[0] // self.batch_rows * self.tiles_of_row

    @property
    def tiles_of_row(self) -> int:
        """Return the number of query tiles per batch row; if not ``even``, an upper bound, since runs then have any length."""
        runs, block = self.rows.shape[0], self.blocks[0]
        return runs * -(-self.slots[0] // block) if self.even else self.q.shape[1] // block + runs

    def query_tile(self, index: jax.Array) -> Tile:
        index = jnp.asarray(index, jnp.int32)  # a loop's counter has 64 bits under x64, and rows are int32
        batch, index = index // self.tiles_of_row, index % self.tiles_of_row
        tiles = -(-self.slots[0] // self.blocks[0])
        run, tile = index // tiles, index % tiles
        if not self.even:
            ends = jnp.cumsum(-(-Row(*jnp.unstack(self.rows[:, 0], axis=-1)).q_len // self.blocks[0]), dtype=jnp.int32)
            run = jnp.minimum((ends <= index).sum(dtype=jnp.int32), len(ends) - 1)
            tile = index - jnp.where(run > 0, ends[run - 1], 0)  # a tile after the last run's has no valid token
        row = self.row(run, 0)
        slot = self.slots[0] if self.even else self.q.shape[1] - row.q_base
        return Tile.of(run, row.q_base, row.q_len, tile, slot, self.blocks[0], BatchRows(batch, self.batch_rows))

    def row(self, q_run: jax.Array, k_run: jax.Array | int) -> Row:
        return Row(*jnp.unstack(self.rows[q_run, k_run]))

    def over_keys(self, queries: Tile, key_tile, state):  # type: ignore[no-untyped-def]
        """Set ``state = key_tile(pair, state)`` for each pair of ``queries`` and a key tile that they may see. Return state."""
        block_k = self.blocks[1]

        def key_run(k_run: jax.Array, state):  # type: ignore[no-untyped-def]
            k_run = jnp.asarray(k_run, jnp.int32)
            row = self.row(queries.run, k_run)
            begin, end = self.keys_within_extents(queries, row)
            first, last = visible_tiles(queries.first, queries.end, row.lo, row.hi, begin, end, block_k)

            def pair(tile: jax.Array) -> Pair:
                slot = self.slots[1] if self.even else self.kv.shape[1] - row.k_base
                keys = Tile.of(k_run, row.k_base, row.k_len, tile, slot, block_k, queries.batch)
                return Pair(self, queries, keys, row)

            def visit(tile: jax.Array, state):  # type: ignore[no-untyped-def]
                met = pair(tile)
                compute = lambda: key_tile(met, state)
                return compute() if (reached := met.reached) is True else lax.cond(reached, compute, lambda: state)

            return lax.fori_loop(first, last, visit, state)

        return lax.fori_loop(0, self.rows.shape[1], key_run, state)

    def keys_within_extents(self, queries: Tile, row: Row) -> tuple[jax.Array | int, jax.Array]:
        """Return (first, end), a range of indices in the key run of ``row`` that holds every key in an extent of ``queries``."""
        if self.score.extents is None:
            return 0, row.k_len
        first, end = self.extents(queries)
        some = queries.valid[None] & (first < end)
        least = jnp.where(some, first, jnp.iinfo(jnp.int32).max).min()
        greatest = jnp.where(some, end, 0).max()
        begin, end = (jnp.clip(-((row.k_start - x) // row.stride), 0, row.k_len) for x in (least, greatest))
        return begin, end

    def extents(self, queries: Tile) -> tuple[jax.Array, jax.Array]:
        """Return first and end (exclusive) of the key positions that each query may see, int32 [1 block_q] each, at least 0."""
        assert self.score.extents is not None
        extents = jnp.maximum(queries.tokens_of(self.score.extents), 0)
        if extents.dtype.itemsize >= 4:
            extents = jnp.minimum(extents, jnp.iinfo(jnp.int32).max)
        first, end = jnp.unstack(extents.astype(jnp.int32), axis=-1)
        return first, end


@dataclass(frozen=True)
class Pair:
    """A pair of a query tile and a key tile: their scores, with masking and dropout."""

    inputs: TileInputs
    queries: Tile
    keys: Tile
    row: Row

    def load_kv(self, v_dim: int) -> tuple[jax.Array, jax.Array]:
        """Return k [b g block_k d] and v [b g block_k v_dim] of the key tile. Set unseen keys to 0: they may be NaN."""
        tile = self.keys.load(self.inputs.kv, self.inputs.groups, valid_only=False)[:, :, 0]
        tile = zero_unless(self.visible.any(-2)[:, :, 0, :, None], tile)
        d = self.inputs.q.shape[-1]
        begin = 0 if tile.shape[-1] == d else d  # 0: the values are columns of k
        return tile[..., :d], tile[..., begin : begin + v_dim]

    def queries_that_see(self, tile: jax.Array) -> jax.Array:
        """Return ``tile`` [b g r block_q width] with 0 at queries that see no key of the key tile: it may hold NaN there."""
        return zero_unless(self.visible.any(-1)[..., None], tile)

    def scores(self, q_tile: jax.Array, k_tile: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return unmasked scores [b g r block_q block_k] and tanh(scale q . k / softcap). Without softcap the tanh is None."""
        scores, tanh = dot("bgrqd,bgkd->bgrqk", q_tile, k_tile), None
        if self.inputs.score.softcap is not None:
            tanh = jnp.tanh(scores / self.inputs.score.softcap)
            scores = tanh * self.inputs.score.softcap
        if self.inputs.score.alibi_slopes is not None:
            slopes = self.inputs.score.alibi_slopes.astype(scores.dtype).reshape(1, self.inputs.groups, -1, 1, 1)
            q_pos, k_pos = self.token_positions
            scores = scores + slopes * (k_pos[None] - q_pos[:, None]).astype(scores.dtype)[None, None, None]
        return scores, tanh

    def drop(self, p: jax.Array) -> jax.Array:
        """Apply dropout to ``p``: set dropped probabilities to 0 and rescale the others."""
        if self.keep_mask is None:
            return p
        return jnp.where(self.keep_mask.reshape(p.shape), p * rescale(self.inputs.score.dropout_rate), 0)

    @cached_property
    def keep_mask(self) -> jax.Array | None:
        """Return the dropout mask, bool [b h block_q block_k], True for kept probabilities; None without dropout."""
        if self.inputs.philox_keys is None:
            return None
        mine = lax.dynamic_slice_in_dim(self.inputs.philox_keys, *self.queries.batch)
        return keep_mask(mine, self.inputs.score.dropout_rate, *self.token_positions)

    @cached_property
    def visible(self) -> jax.Array:
        """Return the mask, bool [b or 1, 1, 1, block_q, block_k]: True if the query sees the key and both tokens are valid."""
        lag = (self.queries.index[:, None] - self.keys.index[None])[None]
        visible = (lag >= self.row.lo) & (lag <= self.row.hi) & self.queries.valid[None, :, None] & self.keys.valid[None, None]
        if self.inputs.score.extents is not None:
            first, end = (x[..., None] for x in self.inputs.extents(self.queries))
            k_pos = self.k_pos[None, None]
            visible &= (k_pos >= first) & (k_pos < end)
        if self.inputs.key_extents is not None:
            visible &= self.within_key_extents
        if self.inputs.key_mask is not None:
            visible &= self.keys.tokens_of(self.inputs.key_mask)[:, None]
        return visible[:, None, None]

    @cached_property
    def within_key_extents(self) -> jax.Array:
        """Return bool [1 block_q block_k]: True if the query's position lies in the key's extent."""
        assert self.inputs.key_extents is not None
        first, end = jnp.unstack(self.keys.tokens_of(self.inputs.key_extents)[:, None], axis=-1)
        q_pos = self.q_pos[None, :, None]
        return (q_pos >= first) & (q_pos < end)

    @property
    def reached(self) -> jax.Array | bool:
        """Return True if a valid query is in a valid key's extent, and this rank needs results. If not, skip the pair."""
        needed = self.inputs.score.needs(self.queries, self.keys)
        if self.inputs.key_extents is None:
            return needed
        return needed & (self.within_key_extents & self.queries.valid[None, :, None] & self.keys.valid[None, None]).any()

    @property
    def token_positions(self) -> tuple[jax.Array, jax.Array]:
        """Return the global positions of queries [block_q] and keys [block_k]; in a traced layout from ``step_positions``."""
        if (step_positions := self.inputs.score.step_positions) is None:
            return self.q_pos, self.k_pos
        own = lambda positions, tile: lax.dynamic_slice_in_dim(positions, tile.base, tile.index.size)
        return own(step_positions[0], self.queries), own(step_positions[1], self.keys)

    @property
    def q_pos(self) -> jax.Array:
        """Return the queries' global positions, int32 [block_q]; in a traced layout their indices in the shard instead."""
        return self.row.q_start + self.row.stride * self.queries.index

    @property
    def k_pos(self) -> jax.Array:
        """Return the keys' global positions, int32 [block_k]; in a traced layout their indices in the shard instead."""
        return self.row.k_start + self.row.stride * self.keys.index


def zero_unless(visible: jax.Array, tile: jax.Array) -> jax.Array:
    """Return ``tile`` with 0 where ``visible`` is False. Skip the select if all of ``visible`` is True."""
    return lax.cond(visible.all(), lambda: tile, lambda: jnp.where(visible, tile, 0))


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
