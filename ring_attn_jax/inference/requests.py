"""The arrays of a cache, and the operations on its requests between steps, such as rollback, reset and fork.

A slot without a token is *empty*: its position is -1, and its k and v have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ring_attn_core.cache import checks
from ring_attn_core.cache.placement import count_held, count_removed
from ring_attn_core.cache.spec import CacheSpec
from ring_attn_core.layouts import padded_local
from ring_attn_core.validation import as_number

from ..data.extents import on_host

Lengths = int | Sequence[int] | jax.Array
Rows = int | Sequence[int]

DATA = ("k", "v", "positions", "counts", "lengths", "reached", "owners", "k_scale", "v_scale", "states")
META = ("spec", "axis_name")


@dataclass(frozen=True, eq=False)
class Requests:
    """The arrays of a cache, described in :class:`KVCache`, and the operations on its requests between steps."""

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    counts: jax.Array
    lengths: jax.Array
    reached: jax.Array
    owners: jax.Array
    k_scale: jax.Array
    v_scale: jax.Array
    spec: CacheSpec
    axis_name: str = "seq"
    states: tuple[tuple[jax.Array, jax.Array], ...] = ()

    @property
    def specs(self) -> Self:
        """A cache with a PartitionSpec in place of each array, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``."""
        same, keys = PartitionSpec(), PartitionSpec(None, None, self.axis_name)
        sharded = {"k": keys, "v": keys, "positions": PartitionSpec(None, self.axis_name)}
        states = jax.tree.map(lambda _: same, self.states)
        return replace(self, **{name: sharded.get(name, same) for name in DATA} | {"states": states})

    def check_room(self, tokens: Lengths = 1, layout: str | None = None) -> Self:
        """Raise ValueError if a request has no room for ``tokens`` more tokens; else return the cache.

        ``tokens``: an int for all requests, or one int each. With ``layout``, the tokens are a chunk for prefill, and each rank
        must have room for its shard of the chunk. With a window the room is unlimited. Call this method outside of jit, before a
        step: it copies ``counts`` to the host, and so waits for the previous step.
        """
        more = [tokens] * self.spec.batch if isinstance(as_number(tokens), int) else tokens
        more = checks.check_lengths(more, self.spec.batch, 2**30, "tokens to come")
        counts = self._read("check_room", self.counts)
        if layout is None:
            for row, count in enumerate(more):
                checks.check_full(self.spec, sum(counts[row]), count, row)
        else:
            local = padded_local(layout, self.spec.ranks, max(more))
            for row, length in enumerate(more):
                checks.check_shards(self.spec, counts[row], count_held(layout, self.spec.ranks, local, length), row)
        return self

    def reserve(self, tokens: int) -> Self:
        """Grow the cache by whole pages until every request has room for ``tokens`` more tokens, spread evenly over the ranks.

        Call it outside of jit. If the arrays grow, jit compiles functions of the cache again. Raise ValueError if the cache was
        not made with ``page``, or if ``tokens`` is not an int of at least 0.
        """
        spec = checks.grown(self.spec, self._read("reserve", self.counts), tokens)
        more = spec.slots - self.spec.slots
        if not more:
            return self

        def longer(x: jax.Array, dim: int, value: int) -> jax.Array:
            parts = x.shape[dim] // self.spec.slots  # the number of ranks whose slots x holds: all or one
            by_rank = x.reshape(*x.shape[:dim], parts, self.spec.slots, *x.shape[dim + 1 :])
            padded = jnp.pad(by_rank, [(0, more if i == dim + 1 else 0) for i in range(by_rank.ndim)], constant_values=value)
            return jax.device_put(padded.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :]), x.sharding)

        owners = jnp.pad(self.owners, [(0, 0), (0, spec.remembered - self.spec.remembered)])
        arrays = {"k": longer(self.k, 2, 0), "v": longer(self.v, 2, 0), "positions": longer(self.positions, 1, -1)}
        return replace(self, **arrays, owners=jax.device_put(owners, self.owners.sharding), spec=spec)

    def rollback(self, lengths: Lengths) -> Self:
        """Truncate each request to its first ``lengths`` tokens.

        ``lengths``: an int for all requests, one int each, or an integer array [batch], equal on all ranks. A shorter request
        stays as it is. With a window a request may go back at most ``room`` tokens from its greatest length since its reset.
        Raise ValueError if a request goes back further, or if the cache has states. Going back too far is not noticed if the host
        cannot read the values: under jit, or if ``lengths`` or the cache's arrays are partly on devices of other processes.
        """
        spec = self.spec
        checks.check_no_states(spec)
        known = np.asarray(lengths) if isinstance(lengths, int | Sequence) else on_host(lengths)
        if known is not None:
            values = known.tolist()
            values = [values] * spec.batch if isinstance(values, int) else values
            kept = checks.check_lengths(values, spec.batch, 2**30, "what the request keeps")
            reached = on_host(self.reached) if spec.room is not None else None
            for row, length in enumerate(kept if reached is not None else ()):
                checks.check_back(spec, int(reached[row]), length, row)  # type: ignore[index]
            keep = jnp.asarray(kept, jnp.int32)
        else:
            checks.check_kept(lengths.shape, str(lengths.dtype), spec.batch)  # type: ignore[union-attr]  # an array
            keep = jnp.maximum(lengths, 0).astype(jnp.int32)  # type: ignore[arg-type]
        keep = jnp.minimum(keep, self.lengths)
        numbers = jnp.arange(spec.remembered, dtype=jnp.int32), jnp.arange(spec.ranks, dtype=jnp.int16)
        counts = self.counts - count_removed(self.lengths, keep, self.owners, *numbers)
        positions = jnp.where(self.positions >= keep[:, None], -1, self.positions)
        return replace(self, positions=positions, counts=counts, lengths=keep)

    def reset(self, rows: Rows | None = None) -> Self:
        """Empty the requests ``rows``, or all requests if ``rows`` is None.

        If ``rows`` is None, also clear float8 scales that were not passed to ``make``; the next step sets them again.
        """
        these = self._rows(range(self.spec.batch) if rows is None else rows)
        nothing = {"positions": -1, "counts": 0, "lengths": 0, "reached": 0}
        arrays = {name: _where(these, value, getattr(self, name), 0) for name, value in nothing.items()}
        if rows is None and self.spec.float8 and not self.spec.scaled:
            arrays |= {"k_scale": jnp.zeros_like(self.k_scale), "v_scale": jnp.zeros_like(self.v_scale)}
        return replace(self, **arrays, states=jax.tree.map(lambda x: _where(these, 0, x, 0), self.states))

    def evict(self, rows: Rows) -> Self:
        """Empty the requests ``rows`` like :meth:`reset`, and overwrite their keys and values with 0 in the returned cache."""
        these = self._rows(rows)
        return replace(self.reset(rows), k=_where(these, 0, self.k, 1), v=_where(these, 0, self.v, 1))

    def fork(self, source: Rows, target: Rows) -> Self:
        """Copy request ``source[i]`` to request ``target[i]``, for each i; a single source is copied to every target.

        All sources are read before a target is written. Raise ValueError if the indices do not fit.
        """
        rows = checks.check_fork(source, target, self.spec.batch)
        sources, targets = (jnp.asarray(x, jnp.int32) for x in rows)
        arrays: dict[str, Any] = {name: getattr(self, name) for name in ("positions", "counts", "lengths", "reached", "owners")}
        arrays = {name: x.at[targets].set(x[sources]) for name, x in arrays.items()}
        copied = lambda x: x.at[:, targets].set(x[:, sources])
        states = jax.tree.map(lambda x: x.at[targets].set(x[sources]), self.states)
        return replace(self, k=copied(self.k), v=copied(self.v), states=states, **arrays)

    def _rows(self, rows: Rows | range) -> jax.Array:
        """Return a mask of the requests in ``rows``, bool [batch]."""
        named = checks.check_rows("rows", rows, self.spec.batch)
        return jnp.asarray([row in named for row in range(self.spec.batch)])

    def _read(self, call: str, x: jax.Array) -> list[Any]:
        values = on_host(x)
        if values is None:
            raise ValueError(
                f"{call} reads the cache on the host, and here it is traced: call it outside of jit, before the step"
            )
        return values.tolist()


def _where(rows: jax.Array, value: int, x: jax.Array, axis: int) -> jax.Array:
    """Return ``x`` with ``value`` at the requests in the mask ``rows`` [batch]; a scatter would need its result's sharding."""
    return jnp.where(rows.reshape([-1 if dim == axis else 1 for dim in range(x.ndim)]), jnp.asarray(value, x.dtype), x)
