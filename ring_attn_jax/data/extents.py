"""The extents of documents and prefixes, which ``data/extents.py`` of ring_attn_core explains.

Extents describe global sequences. ``to_layout(extents, layout, ranks)`` shards them, and pads them with [0, 0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ring_attn_core.data.extents import check_ids, check_one_form, check_prefix, find_disorder, length_of
from ring_attn_core.layouts import check_length
from ring_attn_core.validation import in_words

if TYPE_CHECKING:
    from jaxtyping import Array, Int


def document_extents(
    ids: Int[Array, "batch length"] | None = None,
    *,
    cu_seqlens: Int[Array, " ends"] | None = None,
    length: int | None = None,
) -> Int[Array, "rows length 2"]:
    """Return the extents of packed documents: the first and end (exclusive) position of each token's document.

    The result is int32 [batch, length, 2], or [1, length, 2] for ``cu_seqlens``.

    ``ids`` int [batch, length]: the document of each token, not decreasing along a row. A negative id marks padding. Padding may
    lie before, between or after documents, but not inside one; its extent is [0, 0), and no query sees it.

    ``cu_seqlens`` int [documents + 1], instead of ``ids``: 0, then the end of each document. ``length``: the total number of
    positions, by default the end of the last document; required under jit. Tokens beyond that end are padding.

    Raise ValueError if shapes, dtypes or values break these rules. If the host cannot read the values, as under jit, a row that
    breaks them gets the extents [-1, length), for which attention returns NaN.
    """
    check_one_form(ids, cu_seqlens, length)
    if cu_seqlens is not None:
        return _extents_of_ends(integers("cu_seqlens", cu_seqlens, "documents + 1"), length)
    return _extents_of_ids(integers("ids", ids, "batch", "length"))


def prefix_extents(prefix: int | Int[Array, " batch"], length: int) -> Int[Array, "rows length 2"]:
    """Return the extents of a prefix-LM: token p sees [0, max(prefix, p + 1)). Use them with ``mask=full()``.

    The result is int32 [batch, length, 2], with batch 1 if ``prefix`` is an int. ``prefix``: the number of leading tokens that
    all queries see, an int or int [batch]. ``length``: the sequences' length without padding. Raise ValueError if an argument is
    not an integer, or if ``prefix`` is outside 0 .. length. The value of a traced prefix is not checked.
    """
    check_length(length)
    first = integers("prefix", prefix, *(["batch"] if convert("prefix", prefix).ndim else []))
    check_prefix(on_host(first), length)
    end = jnp.maximum(first.reshape(-1, 1), jnp.arange(1, length + 1, dtype=first.dtype)[None]).astype(jnp.int32)
    return jnp.stack([jnp.zeros_like(end), end], -1)


def integers(name: str, x: Any, *dims: str) -> jax.Array:
    """Return ``x`` as an array of int32, or of int64 if its dtype is int64. ``dims``: the names of its dimensions."""
    array = convert(name, x)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim != len(dims):
        raise ValueError(f"{name} must be integers [{', '.join(dims)}], got {array.dtype} {list(array.shape)}")
    if array.dtype not in (jnp.int32, jnp.int64):
        array = array.astype(jnp.int32)
    values = on_host(x)
    if values is not None and values.dtype != array.dtype and (values.astype(array.dtype) != values).any():
        raise ValueError(f"{name} must fit {array.dtype}, got {values.min()} to {values.max()}")
    return array


def convert(name: str, x: Any) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array or nested lists of equal length, got {in_words(x)}") from error


def on_host(x: Any) -> np.ndarray | None:
    """Return ``x`` as a NumPy array, or None if ``x`` is traced or partly on devices of other processes."""
    return None if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True) else np.asarray(x)


def whole(x: jax.Array, dim: int) -> jax.Array:
    """Return ``x``, all-gathered along ``dim`` if an Explicit mesh axis shards it: a permutation cannot keep such a sharding."""
    x = jnp.asarray(x)
    sharding = jax.typeof(x).sharding
    if sharding.spec[dim] is None:
        return x
    axes = [None if i == dim % x.ndim else axis for i, axis in enumerate(sharding.spec)]
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*axes)))


def _extents_of_ids(ids: jax.Array) -> jax.Array:
    values = on_host(ids)
    check_ids(values, "jnp.where")
    ids, length = whole(ids, 1), ids.shape[1]
    position = jnp.arange(length, dtype=jnp.int32)[None]
    change, edge = ids[:, 1:] != ids[:, :-1], jnp.ones_like(ids[:, :1], bool)
    starts, ends = jnp.concatenate([edge, change], 1), jnp.concatenate([change, edge], 1)
    first = lax.cummax(jnp.where(starts, position, 0), axis=1)
    end = lax.cummin(jnp.where(ends, position + 1, length), axis=1, reverse=True)
    extents = jnp.where((ids < 0)[..., None], 0, jnp.stack([first, end], -1))
    if values is not None:
        return extents
    decreasing, torn = find_disorder(ids, lax.cummax(ids, axis=1))
    return jnp.where((decreasing | torn).any(1)[:, None, None], jnp.array([-1, length], jnp.int32), extents)


def _extents_of_ends(ends: jax.Array, length: int | None) -> jax.Array:
    length = length_of(on_host(ends), ends.shape[0], length, "for a traced cu_seqlens: no shape can depend on its values")
    position = jnp.arange(length, dtype=ends.dtype)
    entry = jnp.searchsorted(ends, position, side="right")
    extents = jnp.stack([ends[entry - 1], jnp.take(ends, entry, mode="clip")], -1)
    wrong = (ends[0] != 0) | (ends[1:] < ends[:-1]).any() | (ends[-1] > length)
    extents = jnp.where((position < ends[-1])[:, None], extents, 0)[None].astype(jnp.int32)
    return jnp.where(wrong, jnp.array([-1, length], jnp.int32), extents)
