"""The conversion of a ring step to local indices, for kernels that require shards of one run and for traced layouts.

The token positions of a shard ascend. So the keys at the positions of an extent [first, end) are neighbours in the shard, and the
extent becomes an interval of key indices. In a balanced layout the extent is first cut to the mask ``lo <= q_pos - k_pos <= hi``:

    [max(first, q_pos - hi), min(end, q_pos - lo + 1)) -> [index of the first such key, index after the last such key)

The new extents thus express the mask too. Key extents become intervals of query indices, and do not express the mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ring_attn_core.kernels.call import BEYOND
from ring_attn_core.runs import Band, Row

from .backend import Backend
from .keys import Keys, clip
from .score import Score
from .state import Arrived, BackwardInputs, Gradients, State


def as_one_run(rows: jax.Array, keys: Keys, score: Score, queries: int, band: Band) -> tuple[jax.Array, Keys, Score]:
    """Convert a step of a balanced layout so that each shard is one run, and return its new rows, keys and score.
    The new rows are one Row of the two whole shards without a mask, because the new extents express ``band``."""
    q_runs, k_runs = rows[:, 0, 2:5], rows[0, :, 5:8]
    batch, tokens = keys.kv.shape[:2]
    q_pos, k_pos = positions_of(q_runs, queries), positions_of(k_runs, tokens)
    least, most = limits(q_pos, band)
    if score.extents is None:
        extents = jnp.broadcast_to(jnp.stack([least[:, 0], most[:, 1]], -1), (batch, queries, 2))
    else:
        extents = jnp.clip(clip(score.extents), least, most)
    key_extents = None if keys.extents is None else _local(q_pos, keys.extents)
    none = jnp.zeros((), jnp.int32)
    one = Row(none - tokens, none + queries, none, q_runs[:, 1].sum(), none, none, k_runs[:, 1].sum(), none, none + 1, none)
    row = jnp.stack([x.astype(jnp.int32) for x in one])
    return row[None, None], keys._replace(extents=key_extents), replace(score, extents=_local(k_pos, extents))


def _local(positions: jax.Array, intervals: jax.Array) -> jax.Array:
    """Convert intervals of token positions, [... 2], to intervals of indices in ``positions``, an array in ascending order."""
    return jnp.searchsorted(positions, intervals, method="scan_unrolled").astype(jnp.int32)


def positions_of(runs: jax.Array, tokens: int) -> jax.Array:
    """Return each token's position, int32 [tokens], ``BEYOND`` at padding. ``runs`` int32 [runs, 3]: (base, length, start)."""
    base, length, start = runs.T[:, None]  # [1 runs] each
    offset = jnp.arange(tokens, dtype=jnp.int32)[:, None] - base
    held = (offset >= 0) & (offset < length)
    return jnp.where(held.any(1), jnp.where(held, start + offset, 0).sum(1, dtype=jnp.int32), jnp.int32(BEYOND))


def impossible(extents: jax.Array, at: jax.Array) -> jax.Array:
    """Return bool [b s], True unless ``0 <= first <= end`` or the query is padding. ``at``: the queries' positions [s]."""
    first, end = jnp.unstack(clip(extents), axis=-1)
    return (at[None] < BEYOND) & ((extents < 0).any(-1) | (end < first))


def limits(at: jax.Array, band: Band) -> tuple[jax.Array, jax.Array]:
    """Return (least, most), int32 [s 2] each: ``jnp.clip(extents, least, most)`` restricts extents to ``band``."""
    none, all_of_them = jnp.zeros_like(at), jnp.full_like(at, BEYOND)
    first = none if band.hi is None else at - band.hi
    end = all_of_them if band.lo is None else at - band.lo + 1
    clip = lambda *both: jnp.clip(jnp.stack(both, -1), 0, BEYOND)
    return clip(first, none), clip(all_of_them, end)


@dataclass(frozen=True)
class TracedRuns:
    """A backend for a traced layout: it converts each step from token positions to local indices, and calls ``backend``.

    Here ``q_start`` and ``k_start`` of a ``runs.Row`` are indices in ``score.positions``, and the extents express the mask.
    """

    backend: Backend

    @property
    def two_arrays(self) -> bool:
        return self.backend.two_arrays

    def attend(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State | None, last: bool) -> State:
        return self.backend.attend(q, *_convert(q, keys, rows, score), total, last)

    def backward_inputs(
        self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State, dtotal: State
    ) -> BackwardInputs:
        query = self.backend.backward_inputs(q, *_convert(q, keys, rows, score), total, dtotal)
        return query._replace(bounds=None)  # each step computes its own bounds

    def attend_backward(
        self, query: BackwardInputs, keys: Keys, rows: jax.Array, score: Score, dq: jax.Array | None, arrived: Arrived, last: bool
    ) -> tuple[jax.Array, Gradients]:
        return self.backend.attend_backward(query, *_convert(query.q, keys, rows, score), dq, arrived, last)


def _convert(q: jax.Array, keys: Keys, rows: jax.Array, score: Score) -> tuple[Keys, jax.Array, Score]:
    """Return the keys, rows and score of a step with indices in the two shards in place of token positions.

    Query extents become intervals of key indices, and key extents intervals of query indices.
    """
    assert score.positions is not None and score.extents is not None
    at, table = Row(*rows[0, 0]), score.positions
    own: Any = lambda start, tokens: table[start + jnp.arange(tokens, dtype=jnp.int32)]
    q_pos, k_pos = own(at.q_start, q.shape[1]), own(at.k_start, keys.kv.shape[1])
    row = jnp.stack(at._replace(q_start=at.q_base, k_start=at.k_base))[None, None]
    key_extents = None if keys.extents is None else _local(q_pos, keys.extents)
    score = replace(score, extents=_local(k_pos, score.extents), step_positions=(q_pos, k_pos))
    return keys._replace(extents=key_extents), row, score
