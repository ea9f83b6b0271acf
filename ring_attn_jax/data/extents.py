"""Extents: one interval of visible key positions per query, for masks that no band (causal, full, sliding window) can express.

Left: documents of 3, 1 and 4 tokens, then two tokens of padding. Right: a prefix of 4 tokens, then 3 causal ones (p: position):

    ids      0  0  0  1  2  2  2  2 -1 -1          p   0  1  2  3  4  5  6
    first    0  0  0  3  4  4  4  4  0  0              0  0  0  0  0  0  0
    end      3  3  3  4  8  8  8  8  0  0              4  4  4  4  5  6  7

Extents describe global sequences. ``to_layout(extents, layout, ranks)`` shards them, and pads them with [0, 0). A query with the
extent [0, 0) sees no key. Such a query is *blank* (``plan/ring.py`` of ring_attn_core).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

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
    if (ids is None) == (cu_seqlens is None):
        raise ValueError(f"document_extents takes either ids or cu_seqlens, got {'neither' if ids is None else 'both'}")
    if cu_seqlens is not None:
        return _extents_of_ends(integers("cu_seqlens", cu_seqlens, "documents + 1"), length)
    if length is not None:
        raise ValueError(f"length={length} goes with cu_seqlens: ids have their own length, leave it out")
    return _extents_of_ids(integers("ids", ids, "batch", "length"))


def prefix_extents(prefix: int | Int[Array, " batch"], length: int) -> Int[Array, "rows length 2"]:
    """Return the extents of a prefix-LM: token p sees [0, max(prefix, p + 1)). Use them with ``mask=full()``.

    The result is int32 [batch, length, 2], with batch 1 if ``prefix`` is an int. ``prefix``: the number of leading tokens that
    all queries see, an int or int [batch]. ``length``: the sequences' length without padding. Raise ValueError if an argument is
    not an integer, or if ``prefix`` is outside 0 .. length. The value of a traced prefix is not checked.
    """
    check_length(length)
    first = integers("prefix", prefix, *(["batch"] if converted("prefix", prefix).ndim else []))
    values = on_host(first)
    if values is not None and ((values < 0) | (values > length)).any():
        raise ValueError(f"prefix must be 0 to length={length} tokens, got {_short(values)}")
    end = jnp.maximum(first.reshape(-1, 1), jnp.arange(1, length + 1, dtype=first.dtype)[None]).astype(jnp.int32)
    return jnp.stack([jnp.zeros_like(end), end], -1)


def integers(name: str, x: Any, *dims: str) -> jax.Array:
    """Return ``x`` as an array of int32, or of int64 if its dtype is int64. ``dims``: the names of its dimensions."""
    array = converted(name, x)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim != len(dims):
        raise ValueError(f"{name} must be integers [{', '.join(dims)}], got {array.dtype} {list(array.shape)}")
    if array.dtype not in (jnp.int32, jnp.int64):
        array = array.astype(jnp.int32)
    values = on_host(x)
    if values is not None and values.dtype != array.dtype and (values.astype(array.dtype) != values).any():
        raise ValueError(f"{name} must fit {array.dtype}, got {values.min()} to {values.max()}")
    return array


def converted(name: str, x: Any) -> jax.Array:
    """Return ``x`` as an array."""
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
    if values is not None:
        _check_ids(values)
    ids, length = whole(ids, 1), ids.shape[1]
    position = jnp.arange(length, dtype=jnp.int32)[None]
    change, edge = ids[:, 1:] != ids[:, :-1], jnp.ones_like(ids[:, :1], bool)
    starts, ends = jnp.concatenate([edge, change], 1), jnp.concatenate([change, edge], 1)
    first = lax.cummax(jnp.where(starts, position, 0), axis=1)
    end = lax.cummin(jnp.where(ends, position + 1, length), axis=1, reverse=True)
    extents = jnp.where((ids < 0)[..., None], 0, jnp.stack([first, end], -1))
    if values is not None:
        return extents
    decreasing, torn = _disorder(ids, lax.cummax(ids, axis=1))
    return jnp.where((decreasing | torn).any(1)[:, None, None], jnp.array([-1, length], jnp.int32), extents)


def _disorder(ids: Any, highest: Any) -> tuple[Any, Any]:
    """Return bool [batch, length - 1] twice: ids that decrease, and ids that go on after padding. ``highest``: the id so far."""
    before, this, highest = ids[:, :-1], ids[:, 1:], highest[:, :-1]
    return (this >= 0) & (this < highest), (this >= 0) & (this == highest) & (before < 0)


def _check_ids(ids: np.ndarray) -> None:
    highest = np.maximum.accumulate(ids, 1)
    decreasing, torn = _disorder(ids, highest)
    for row, i in np.argwhere(decreasing | torn)[:1]:
        where = f"document {ids[row, i + 1]} at row {row}, token {i + 1}"
        if decreasing[row, i]:
            wrong = f"document ids must not decrease along a row, got {where}, after {highest[row, i]}"
            zero = "if 0 is padding, as in MaxText, make it negative: jnp.where(ids == 0, -1, ids)"
            raise ValueError(f"{wrong}: " + ("sort them" if ids[row, i + 1] else f"{zero}; else sort them"))
        raise ValueError(
            f"padding (a negative id) inside a document cannot be an extent, one interval per query: {where}, goes on after it. "
            "Give what follows a new id, or give that padding the document's id and mask it with key_mask"
        )


def _extents_of_ends(ends: jax.Array, length: int | None) -> jax.Array:
    if length is not None:
        check_length(length)
    values = on_host(ends)
    if values is None and length is None:
        raise ValueError("document_extents needs length=... for a traced cu_seqlens: no shape can depend on its values")
    if ends.shape[0] == 0 or (values is not None and (values[0] != 0 or (np.diff(values) < 0).any())):
        got = "nothing" if values is None else _short(values)
        raise ValueError(f"cu_seqlens must be 0 and then the end of every document, none before the last, got {got}")
    length = int(values[-1]) if length is None else length  # type: ignore[index]  # refused above where values is None
    if values is not None and values[-1] > length:
        raise ValueError(f"cu_seqlens ends at {values[-1]}, beyond length={length}: pass a length of at least {values[-1]}")
    position = jnp.arange(length, dtype=ends.dtype)
    entry = jnp.searchsorted(ends, position, side="right")
    extents = jnp.stack([ends[entry - 1], jnp.take(ends, entry, mode="clip")], -1)
    wrong = (ends[0] != 0) | (ends[1:] < ends[:-1]).any() | (ends[-1] > length)
    extents = jnp.where((position < ends[-1])[:, None], extents, 0)[None].astype(jnp.int32)
    return jnp.where(wrong, jnp.array([-1, length], jnp.int32), extents)


def _short(values: np.ndarray) -> str:
    return np.array2string(values, threshold=8, separator=", ")
