"""The arrays that travel round the ring: keys and values in one array, and the key mask as bits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Keys(NamedTuple):
    """``kv`` [b t g d+e]: k, then v on the last dimension; or, if nothing travels, k alone and ``v`` [b t g e] unpacked.

    ``bits`` uint8 [b, ceil(t / 8)]: bit j % 8 of byte j // 8 is 1 if key j may be attended; None if all may.
    """

    kv: jax.Array
    bits: jax.Array | None = None
    v: jax.Array | None = None


def pack(k: jax.Array, v: jax.Array, key_mask: jax.Array | None = None, apart: bool = False) -> Keys:
    """Pack k [b t g d], v [b t g e] and key_mask bool [b t].

    Masked keys and values become 0, even if they hold NaN.
    """
    arrays = [k, v] if apart else [jnp.concatenate([k, v], -1)]
    bits = None
    if key_mask is not None:
        arrays = [jnp.where(key_mask[..., None, None], x, 0) for x in arrays]
        bits = jnp.packbits(key_mask, axis=1, bitorder="little")
    return Keys(arrays[0], bits, *arrays[1:])


def unpack(keys: Keys) -> jax.Array | None:
    """Return the key mask, bool [b t]; None if each key may be attended."""
    if keys.bits is None:
        return None
    return jnp.unpackbits(keys.bits, axis=1, count=keys.kv.shape[1], bitorder="little").astype(bool)
