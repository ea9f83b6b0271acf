"""The arrays of a key shard, which travel between ranks: packed k and v, the key mask as bits, and the key extents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.kernels.call import BEYOND


class Keys(NamedTuple):
    """A shard of keys and values. ``kv`` [b t g d+e] holds both, or k alone [b t g d] if ``v`` [b t g e] or k has the values.

    ``bits`` uint8 [b, ceil(t / 8)]: bit j % 8 of byte j // 8 is 1 if key j may be attended. ``extents`` int32 [b t 2]: the first
    and the end of the query positions (``one_run.py``: local indices) that may see a key.
    """

    kv: jax.Array
    bits: jax.Array | None = None
    v: jax.Array | None = None
    extents: jax.Array | None = None


def pack(
    k: jax.Array,
    v: jax.Array | None,
    key_mask: jax.Array | None = None,
    key_extents: jax.Array | None = None,
    two_arrays: bool = False,
) -> Keys:
    """Pack k [b t g d], v [b t g e] (None: columns of k), key_mask bool [b t] and key_extents [b t 2]. Masked keys and values
    become 0, even NaN. Extents are clipped to 0 .. ``BEYOND``. ``two_arrays`` keeps k and v apart, which saves a copy, if no keys
    travel."""
    arrays = [k] if v is None else [k, v] if two_arrays else [jnp.concatenate([k, v], -1)]
    bits = None
    if key_mask is not None:
        arrays = [jnp.where(key_mask[..., None, None], x, 0) for x in arrays]
        bits = bits_of(key_mask)
    return Keys(arrays[0], bits, arrays[1] if len(arrays) == 2 else None, None if key_extents is None else clip(key_extents))


def bits_of(key_mask: jax.Array) -> jax.Array:
    """Pack a key mask, bool [b t], into uint8 [b, ceil(t / 8)], the ``bits`` of ``Keys``."""
    return jnp.packbits(key_mask, axis=1, bitorder="little")


def clip(extents: jax.Array) -> jax.Array:
    """Return extents [b n 2] of any integer dtype as int32, clipped to 0 .. ``BEYOND``."""
    extents = jnp.maximum(extents, 0)
    return (jnp.minimum(extents, BEYOND) if extents.dtype.itemsize >= 4 else extents).astype(jnp.int32)


def unpack(keys: Keys) -> jax.Array | None:
    """Unpack the key mask, bool [b t], from its bits. Return None without a key mask."""
    return None if keys.bits is None else _mask_of(keys.bits, keys.kv.shape[1])


def join(parts: Keys, tokens: int) -> Keys:
    """Concatenate shards of ``tokens`` tokens. Each array of ``parts`` stacks all shards, [shards b ...]; k and v are packed."""
    bits = parts.bits
    if bits is not None:
        masks = None if tokens % 8 == 0 else [_mask_of(each, tokens) for each in bits]
        bits = side_by_side(bits) if masks is None else bits_of(jnp.concatenate(masks, 1))
    return Keys(side_by_side(parts.kv), bits, None, None if parts.extents is None else side_by_side(parts.extents))


def cut(keys: Keys, first: jax.Array, tokens: int) -> Keys:
    return along_tokens(lambda x: lax.dynamic_slice_in_dim(x, first, tokens, 1), keys)


def along_tokens(function: Callable[[jax.Array], jax.Array], keys: Keys) -> Keys:
    """Apply ``function``, which selects tokens of arrays [b t ...], to each array of ``keys``."""
    part: Keys = jax.tree.map(function, keys._replace(bits=unpack(keys)))
    return part if part.bits is None else part._replace(bits=bits_of(part.bits))


def place(parts: Sequence[tuple[jax.Array, Keys]], like: Keys) -> Keys:
    """Return keys shaped as ``like`` that hold each part (first, keys) from token ``first`` on; the rest is 0 and masked."""
    if len(parts) == 1 and parts[0][1].kv.shape == like.kv.shape:
        return parts[0][1]
    shard: Keys = jax.tree.map(jnp.zeros_like, like._replace(bits=unpack(like)))
    for first, part in parts:
        written = lambda x, new, first=first: lax.dynamic_update_slice_in_dim(x, new, first, 1)
        shard = jax.tree.map(written, shard, part._replace(bits=unpack(part)))
    return shard if shard.bits is None else shard._replace(bits=bits_of(shard.bits))


def side_by_side(x: jax.Array) -> jax.Array:
    """Concatenate shards along the tokens: [shards b n ...] to [b shards*n ...]."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:])


def _mask_of(bits: jax.Array, tokens: int) -> jax.Array:
    if not bits.size:  # jnp.unpackbits divides by the size of a batch
        return jnp.zeros((*bits.shape[:1], tokens), bool)
    return jnp.unpackbits(bits, axis=1, count=tokens, bitorder="little").astype(bool)
