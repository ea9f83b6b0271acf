"""Transfers of arrays between the ranks of a ring: point to point, all-to-all in a group, or all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

T = TypeVar("T")
Groups = list[list[int]] | None
"""The ranks of each group; None for a single group of all ranks."""


def send(x: T, hop: int, axis: str, ranks: int) -> T:
    """Send ``x``, an array or a tree of arrays, to rank + ``hop`` by ppermute. Return the ``x`` that rank - ``hop`` sends."""
    return send_from(x, range(ranks), hop, axis, ranks)


def send_from(x: T, senders: Sequence[int], hop: int, axis: str, ranks: int) -> T:
    """Send ``x`` as ``send`` does, but only from the ranks ``senders``. Return zeros on ranks that receive nothing."""
    return lax.ppermute(x, axis, [(rank, (rank + hop) % ranks) for rank in senders])


def send_inside(x: T, hop: int, ranks: int, axis: str, members: int) -> T:
    """Send ``x`` as ``send`` does, but each ``ranks`` consecutive ranks form a ring. ``members``: number of ranks of the axis."""
    place = lambda rank: rank // ranks * ranks + (rank + hop) % ranks
    return lax.ppermute(x, axis, [(rank, place(rank)) for rank in range(members)])


def exchange(x: jax.Array, split: int, join: int, axis: str, groups: Groups) -> jax.Array:
    """Exchange slices by all-to-all in each group: slice ``x`` along dimension ``split``, and concatenate along ``join``."""
    call = lambda x: lax.all_to_all(x, axis, split, join, tiled=True, axis_index_groups=groups)
    return _with_vmap(call, lambda x: exchange(x, split + 1, join + 1, axis, groups), x, groups)


def to_ranks(x: jax.Array, axis: str) -> jax.Array:
    """Send ``x[r]`` to rank r, and stack what all ranks send. Flat: XLA of jax 0.12 may lay out slices differently."""
    return lax.all_to_all(x.reshape(-1), axis, 0, 0, tiled=True).reshape(x.shape)


def all_gather(x: jax.Array, axis: str, groups: Groups = None, stack: int = 0) -> jax.Array:
    """Gather ``x`` from all ranks of the group by all-gather, and stack it in rank order on the new dimension ``stack``."""
    # not lax.all_gather's own stack, which jax.export cannot lower for a symbolic batch
    call = lambda x: lax.all_gather(jnp.expand_dims(x, stack), axis, axis=stack, axis_index_groups=groups, tiled=True)
    return _with_vmap(call, lambda x: all_gather(x, axis, groups, stack + 1), x, groups)


def _with_vmap(
    call: Callable[[jax.Array], jax.Array], batched: Callable[[jax.Array], jax.Array], x: jax.Array, groups: Groups
) -> Any:
    """Return ``call(x)``. With groups, make ``batched`` its vmap rule, because JAX cannot vmap an all-to-all in groups."""
    if groups is None:
        return call(x)
    call = custom_vmap(call)
    call.def_vmap(lambda size, mapped, x: (batched(x), True))  # type: ignore[attr-defined]
    return call(x)


def groups_of(size: int, ranks: int) -> Groups:
    """Return the groups of ``size`` consecutive ranks, or None if a single group has all ranks."""
    return None if size == ranks else [list(range(first, first + size)) for first in range(0, ranks, size)]
