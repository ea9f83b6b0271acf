"""What makes a score of q . k besides q and k, and who computes it: everything of a call that stays on its rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ring_attn_core.dropout import (
    WORD,
    check_draw,
    number,
    philox2x32,
    place_of_key,
    place_of_query,
    seed_words,
    stream,
    threshold,
)
from ring_attn_core.kernels.calls import Call

State = tuple[jax.Array, jax.Array]
"""(out [b s h e], lse [b s h]) over the keys seen so far."""

Gradients = jax.Array | tuple[jax.Array, ...]
"""Of keys: dkv packed like k and v, or dk and dv where they are apart."""


class Cotangents(NamedTuple):
    """What every step of the backward needs of the queries: q [b s h d], dout [b s h e], and of their sums what the backend uses.

    ``lse``, ``delta``: [b s h]; for kernels [b h s], lse in base 2. ``bounds``: of the extents of a kernel's query tiles.
    """

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    bounds: jax.Array | None = None


class Draw(NamedTuple):
    """What dropout draws by, each a 0-d uint32: both words of the seed, the global index of the first batch row and head."""

    low: jax.Array
    high: jax.Array
    batch: jax.Array
    head: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["scale", "softcap", "dropout_rate", "call", "blanks"],
    data_fields=["extents", "sinks", "slopes", "draw"],
)
@dataclass(frozen=True)
class Score:
    """``s_ij = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)`` where query i may see key j; None: left out."""

    scale: float
    softcap: float | None
    dropout_rate: float
    call: Call | None = None
    """What kernels are launched with; None: the blockwise backend computes."""
    blanks: bool = True
    """Some query, padding included, may see nothing."""
    extents: jax.Array | None = None
    """int [b s 2]: first and end (exclusive) of the key positions that a query may see."""
    sinks: jax.Array | None = None
    """[h]: logits in every softmax's denominator."""
    slopes: jax.Array | None = None
    """[h]: what ALiBi adds for each position that the key is ahead of the query."""
    draw: Draw | None = None


def draw_of(seed: Any, offset: Any) -> Draw:
    """The ``draw`` of a Score; ValueError for what is no 0-d integer. A seed that is one already stays as it is."""
    if isinstance(seed, Draw):
        return seed
    if not isinstance(offset, tuple | list) or len(offset) != 2:
        raise ValueError(
            f"dropout_offset is a pair, the global index of the first batch row and of the first head, got {offset!r}"
        )
    for name, x in (("dropout_seed", seed), ("dropout_offset[0]", offset[0]), ("dropout_offset[1]", offset[1])):
        if not (_is_integer(x) if isinstance(x, jax.Array | np.ndarray) else isinstance(x, int | np.integer)) or x is True:
            raise ValueError(f"{name} must be an int or a 0-d integer array (of a PRNG key: jax.random.bits(key)), got {x!r}")
    check_draw(*(x if isinstance(x, jax.Array) else int(x) for x in (seed, *offset)))
    return Draw(*_words(seed), *(_words(x)[0] for x in offset))


def _words(x: Any) -> tuple[jax.Array, jax.Array]:
    """The lower and the upper 32 bits, in uint32."""
    if not isinstance(x, jax.Array):
        low, high = seed_words(int(x))
    elif x.dtype.itemsize == 8:
        low, high = seed_words(x)
    else:
        low, high = x, jnp.where(x < 0, jnp.uint32(WORD), 0)
    return jnp.asarray(low, jnp.uint32), jnp.asarray(high, jnp.uint32)


def _is_integer(x: Any) -> bool:
    return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)


def streams(draw: Draw, batch: int, heads: int) -> jax.Array:
    """uint32 [batch, heads]: the key by which dropout draws for each; once a call, for it is half of what drawing compiles to."""
    b = draw.batch + jnp.arange(batch, dtype=jnp.uint32)[:, None]
    h = draw.head + jnp.arange(heads, dtype=jnp.uint32)
    return stream((draw.low, draw.high), b, h, _multiply, jnp.uint32)


def kept(streams: jax.Array, rate: float, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """bool [batch, heads, queries, keys]: which probabilities dropout keeps, from global positions [queries] and [keys]."""
    word = lambda x: x.astype(jnp.uint32)
    (of_q, which), (of_k, turn) = place_of_query(word(q_pos)[:, None]), place_of_key(word(k_pos))
    words = philox2x32((of_q, of_k), streams[:, :, None, None], _multiply, jnp.uint32)
    return number(jnp.where(which == 0, *words), turn) >= threshold(rate)


def _multiply(a: jax.Array, constant: int) -> tuple[jax.Array, jax.Array]:
    """Upper and lower 32 bits of the product, by halves: there is no 64-bit integer without x64."""
    low, high = a & 0xFFFF, a >> 16
    c_low, c_high = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    middle = high * c_low + (low * c_low >> 16)
    carry = low * c_high + (middle & 0xFFFF)
    return high * c_high + (middle >> 16) + (carry >> 16), a * jnp.uint32(constant)
