"""Dropout's random numbers in JAX: one Philox key per batch row and head, the keep mask, and a call's mask.

The algorithm is in ``dropout.py`` of the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ring_attn_core.dropout import (
    WORD,
    check_seed,
    number,
    philox2x32,
    philox_key,
    place_of_key,
    place_of_query,
    seed_words,
    threshold,
)
from ring_attn_core.problem.checks import check_dropout_rate, check_mask_sizes
from ring_attn_core.validation import in_words

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


class DropoutState(NamedTuple):
    """Four 0-d uint32 arrays: lower and upper 32 bits of the seed, and global indices of the first local batch row and head."""

    low: jax.Array
    high: jax.Array
    batch: jax.Array
    head: jax.Array


def dropout_state(seed: Any, offset: Any) -> DropoutState:
    """Return the dropout state of a seed and an offset (batch row, head), or ``seed`` itself if it is a ``DropoutState``."""
    if isinstance(seed, DropoutState):
        return seed
    if not isinstance(offset, tuple | list) or len(offset) != 2:
        raise ValueError(
            f"dropout_offset is a pair, the global index of the first batch row and of the first head, got {offset!r}"
        )
    for name, x in (("dropout_seed", seed), ("dropout_offset[0]", offset[0]), ("dropout_offset[1]", offset[1])):
        is_integer = _is_integer(x) if isinstance(x, jax.Array | np.ndarray) else isinstance(x, int | np.integer)
        if not is_integer or isinstance(x, bool):
            got = "a PRNG key array" if _is_key(x) else in_words(x)
            raise ValueError(f"{name} must be an int or a 0-d integer array (of a PRNG key: jax.random.bits(key)), got {got}")
    check_seed(*(x if isinstance(x, jax.Array) else int(x) for x in (seed, *offset)))
    return DropoutState(*_words(seed), *(_words(x)[0] for x in offset))


def _words(x: Any) -> tuple[jax.Array, jax.Array]:
    """Return the lower and the upper 32 bits of an int or a 0-d integer array as uint32."""
    if not isinstance(x, jax.Array):
        low, high = seed_words(int(x))
    elif x.dtype.itemsize == 8:
        low, high = seed_words(x)
    else:
        low, high = x, jnp.where(x < 0, jnp.uint32(WORD), 0)
    return jnp.asarray(low, jnp.uint32), jnp.asarray(high, jnp.uint32)


def _is_integer(x: Any) -> bool:
    return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)


def _is_key(x: Any) -> bool:
    """Return True if ``x`` seems to be a PRNG key: made by ``jax.random.key``, or uint32 [2] as from ``jax.random.PRNGKey``."""
    if not isinstance(x, jax.Array):
        return False
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.shape == (2,) and x.dtype == jnp.uint32)


def philox_keys(state: DropoutState, batch: int, heads: int) -> jax.Array:
    """Return the Philox key of each batch row and head, uint32 [batch, heads]. Call it per step, not per tile: it is costly."""
    b = state.batch + jnp.arange(batch, dtype=jnp.uint32)[:, None]
    h = state.head + jnp.arange(heads, dtype=jnp.uint32)[None]
    return philox_key((state.low, state.high), b, h, multiply, jnp.uint32)


def keep_mask(philox_keys: jax.Array, rate: float, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Return dropout's keep mask, bool [batch, heads, queries, keys], True for kept, for the given global positions."""
    word = lambda x: x.astype(jnp.uint32)
    (q_at, which), (k_at, turn) = place_of_query(word(q_pos)[None, None, :, None]), place_of_key(word(k_pos)[None, None, None])
    words = philox2x32((q_at, k_at), philox_keys[:, :, None, None], multiply, jnp.uint32)
    return number(jnp.where(which == 0, *words), turn) >= threshold(rate)


def multiply(a: jax.Array, constant: int) -> tuple[jax.Array, jax.Array]:
    """Return the upper and lower 32 bits of ``a * constant``. Multiply 16-bit halves: JAX without x64 has no 64-bit integers."""
    low, high = a & 0xFFFF, a >> 16
    c_low, c_high = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    middle = high * c_low + (low * c_low >> 16)
    carry = low * c_high + (middle & 0xFFFF)
    return high * c_high + (middle >> 16) + (carry >> 16), a * jnp.uint32(constant)


def dropout_mask(
    q_positions: Int[Array, " queries"],
    k_positions: Int[Array, " keys"],
    *,
    batch: int,
    heads: int,
    dropout_rate: float,
    dropout_seed: Any,
    dropout_offset: tuple[Any, Any] = (0, 0),
) -> Bool[Array, "batch heads queries keys"]:
    """Return the dropout mask of :func:`ring_attention`, bool [batch, heads, queries, keys]; True keeps a probability.

    Kept probabilities are divided by 1 - rate, with the rate rounded to a multiple of 2^-16.

    ``q_positions``, ``k_positions``: global token positions of the queries and keys, not checked. ``heads``: query heads.
    ``dropout_rate``, ``dropout_seed``, ``dropout_offset``: as in :func:`ring_attention`, but not None. The random bits are
    Philox2x32-7 of seed, batch row, head, query position and key position, the same on any ring and in either framework. The mask
    has an entry for each score, so use it for short sequences, as in a test. Raise ValueError if positions are not 1-D, or if
    another argument is out of its range.
    """
    check_dropout_rate(dropout_rate)
    q_at, k_at = jnp.asarray(q_positions), jnp.asarray(k_positions)
    check_mask_sizes(batch, heads, q_at.ndim, k_at.ndim)
    keys = philox_keys(dropout_state(dropout_seed, dropout_offset), batch, heads)
    return keep_mask(keys, dropout_rate, q_at, k_at)
