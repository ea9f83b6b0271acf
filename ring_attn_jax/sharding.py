"""Whole arrays to shards and back, and what goes with the tokens of a rank: positions and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ring_attn_core.layouts import check_rank, named, padded_local
from ring_attn_core.masks import full
from ring_attn_core.plan import RingPlan

if TYPE_CHECKING:
    from jaxtyping import Array, Int


class Shard(NamedTuple):
    """What ``shard_batch`` returns; every array is in layout order along dimension 1."""

    ids: jax.Array
    """int [batch, tokens]: token ids, 0 at padding."""
    labels: jax.Array
    """int [batch, tokens]: the next token's id, ``ignore_index`` where there is none."""
    positions: jax.Array
    """int32 [batch, tokens]: global positions, for rotary embeddings."""
    extents: jax.Array | None
    """int32 [batch, tokens, 2] or None: what each query may see."""
    key_mask: jax.Array | None
    """bool [batch, tokens] or None: which keys may be attended."""
    length: int
    """The true global number of tokens, for ``ring_attention(..., length=length)``."""


def to_layout(x: jax.Array, layout: str, ranks: int, dim: int = 1, pad_value: Any = 0) -> jax.Array:
    """Pad and permute a whole array so that its ``ranks`` equal chunks along ``dim`` are the shards of rank 0, 1, ...

    ``x`` has its tokens in natural order along ``dim``; they are padded at the end with ``pad_value`` to the least number that
    the layout can cut equally. Raises ValueError for an unknown layout.
    """
    order = _order(layout, ranks, x.shape[dim])
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, len(order) - x.shape[dim])
    return _take(jnp.pad(_whole(x, dim), padding, constant_values=pad_value), order, dim)


def from_layout(x: jax.Array, layout: str, ranks: int, length: int, dim: int = 1) -> jax.Array:
    """The inverse of :func:`to_layout`: the shards' tokens in natural order, padding cut off at ``length``.

    Raises ValueError where ``x`` is not as long as ``to_layout`` makes ``length`` tokens.
    """
    order = _order(layout, ranks, length)
    if x.shape[dim] != len(order):
        raise ValueError(
            f"from_layout expects {len(order)} tokens along dim {dim} for length={length} over {ranks} ranks in {layout}, "
            f"got {x.shape[dim]}: pass the length that to_layout was given"
        )
    inverse = sorted(range(len(order)), key=order.__getitem__)[:length]
    return _take(_whole(x, dim), inverse, dim)


def positions(layout: str, ranks: int, length: int, rank: int | jax.Array) -> Int[Array, " seq_local"]:
    """int32 [seq_local]: the global position of every token of a rank, in shard order; padding has positions >= length.

    ``rank`` may be traced (``lax.axis_index``). Raises ValueError for an int that is none of the ranks.
    """
    check_rank(rank, ranks)
    local = padded_local(layout, ranks, length)
    starts = [[run.start for run in named(layout)(r, ranks, local)] for r in range(ranks)]
    slot = named(layout)(0, ranks, local)[0]
    start = jnp.asarray(starts, jnp.int32)[rank]
    return (start[:, None] + slot.stride * jnp.arange(slot.length, dtype=jnp.int32)).reshape(-1)


def shard_batch(
    ids: Int[Array, "batch length"],
    layout: str,
    ranks: int,
    rank: int | jax.Array | None = None,
    *,
    labels: Int[Array, "batch length"] | None = None,
    documents: Any = None,
    key_mask: Any = None,
    ignore_index: int = -100,
) -> Shard:
    """Token ids [batch, length] of whole sequences -> the shard of ``rank``, or all shards in layout order where it is None.

    ``labels`` [batch, length]: what each token should predict; None shifts ``ids`` by one *before* sharding, so that the label
    of a shard's last token is right. Padding gets ``ignore_index``. Raises ValueError for shapes that do not fit.
    """
    if documents is not None or key_mask is not None:
        raise NotImplementedError("documents and key_mask of shard_batch do not work yet; leave them at None")
    check_rank(rank, ranks)
    if ids.ndim != 2:
        raise ValueError(f"ids must be [batch, length] of whole sequences, got shape {list(ids.shape)}")
    ids, labels = _signed(ids), None if labels is None else _signed(labels)
    if labels is None:
        labels = jnp.concatenate([ids[:, 1:], jnp.full_like(ids[:, :1], ignore_index)], 1)
    if labels.shape != ids.shape:
        raise ValueError(f"labels must have the shape of ids {list(ids.shape)}, got {list(labels.shape)}")
    length = ids.shape[1]
    ids = to_layout(ids, layout, ranks)
    labels = to_layout(labels, layout, ranks, pad_value=ignore_index)
    where = jnp.broadcast_to(jnp.concatenate([positions(layout, ranks, length, r) for r in range(ranks)]), ids.shape)
    chunk = lambda x: x if rank is None else jnp.stack(jnp.split(x, ranks, 1))[rank]
    return Shard(chunk(ids), chunk(labels), chunk(where), None, None, length)


def _signed(ids: jax.Array) -> jax.Array:
    """Integers that have a place for ignore_index, as unsigned ids have not."""
    return ids if jnp.issubdtype(ids.dtype, jnp.signedinteger) and ids.dtype.itemsize >= 4 else jnp.asarray(ids).astype(jnp.int32)


def _take(x: jax.Array, order: list[int], dim: int) -> jax.Array:
    return jnp.take(x, jnp.asarray(order, jnp.int32), axis=dim)


def _whole(x: jax.Array, dim: int) -> jax.Array:
    """``x``, gathered along ``dim`` where an Explicit mesh axis shards it: its permutation would have no sharding of its own."""
    x = jnp.asarray(x)
    sharding = jax.typeof(x).sharding
    if sharding.spec[dim] is None:
        return x
    axes = [None if i == dim % x.ndim else axis for i, axis in enumerate(sharding.spec)]
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*axes)))


def _plan(layout: str, ranks: int, length: int) -> RingPlan:
    return RingPlan(layout, full(), ranks, padded_local(layout, ranks, length), length=length)


def _order(layout: str, ranks: int, length: int) -> list[int]:
    """The natural position of every token of the padded array in layout order."""
    plan = _plan(layout, ranks, length)
    return [position for rank in range(ranks) for position in plan.positions(rank)]
