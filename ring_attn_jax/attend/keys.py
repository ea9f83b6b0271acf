"""What travels round the ring: keys and values in one array, and the key mask as bits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Keys(NamedTuple):
    """``kv`` [b t g d+e]: k, then v on the last dimension; or k alone, where nothing travels, and ``v`` [b t g e] apart.

    ``bits`` uint8 [b, ceil(t / 8)]: bit j % 8 of byte j // 8 says whether key j may be attended; None where all may.
    """

    kv: jax.Array
    bits: jax.Array | None = None
    v: jax.Array | None = None


def pack(k: jax.Array, v: jax.Array, key_mask: jax.Array | None = None, apart: bool = False) -> Keys:
    """k [b t g d], v [b t g e], key_mask bool [b t]: keys that may not be attended become 0, whatever stands there."""
    arrays = [k, v] if apart else [jnp.concatenate([k, v], -1)]
    bits = None
    if key_mask is not None:
        arrays = [jnp.where(key_mask[..., None, None], x, 0) for x in arrays]
        bits = jnp.packbits(key_mask, axis=1, bitorder="little")
    return Keys(arrays[0], bits, *arrays[1:])


def unpack(keys: Keys) -> jax.Array | None:
    """The key mask: bool [b t], None where every key may be attended."""
    if keys.bits is None:
        return None
    return jnp.unpackbits(keys.bits, axis=1, count=keys.kv.shape[1], bitorder="little").astype(bool)
