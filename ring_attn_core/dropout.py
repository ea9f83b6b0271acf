"""Which attention probabilities dropout keeps: a pure function of (seed, batch, head, q_pos, k_pos), all of them global.

The counter-based generator Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3), so
that nothing is stored, and the kept set is the same for every layout, ring, framework and backend:

    word = philox(counter = (k_pos // 4, q_pos, head, batch), key = seed)[k_pos % 4]          kept where word >= rate 2^32

One function of ``+ & ^ >>`` works on numpy, torch and jnp; only the 64-bit product differs, so it is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LANES = 4
"""Words of one counter: neighbouring key positions share it."""

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF

Words = tuple[Any, Any, Any, Any]


def philox(
    counter: Words, key: tuple[Any, Any], multiply: Callable[[Any, int], tuple[Any, Any]], word: Callable[[int], Any] = int
) -> Words:
    """The four 32-bit words of a counter of four and a key of two, elementwise.

    ``multiply(a, constant)`` gives the (upper, lower) 32 bits of the product. Words are below 2^32 in whatever integers the
    caller has, wider or uint32; ``word`` makes one of a constant.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = multiply(c0, MULTIPLIERS[0])
        high1, low1 = multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + word(WEYL[0])) & word(WORD), (k1 + word(WEYL[1])) & word(WORD)
    return c0, c1, c2, c3


def threshold(rate: float) -> int:
    """The least word that is kept: a share ``rate`` of all words is below it."""
    return min(round(rate * 2**32), WORD)


def check_draw(seed: Any, first_batch: Any, first_head: Any) -> None:
    """ValueError for ints that are too wide: a seed beyond int64, an index that is negative or beyond 32 bits."""
    if isinstance(seed, int) and not -(2**63) <= seed < 2**63:
        raise ValueError(f"dropout_seed must fit in 64 bits with a sign, got {seed}: take it modulo 2**63")
    for name, x in (("first batch row", first_batch), ("first head", first_head)):
        if isinstance(x, int) and not 0 <= x <= WORD:
            raise ValueError(f"dropout_offset holds the global index of the {name}, 0 to 2**32 - 1, got {x}")


def seed_words(seed: Any) -> tuple[Any, Any]:
    """The lower and the upper 32 bits of a seed, an int or a wide integer array; they make the key."""
    return seed & WORD, (seed >> 32) & WORD


def kept(seed: int, rate: float, batch: int, heads: int, q_pos: Any, k_pos: Any, offset: tuple[int, int] = (0, 0)) -> Any:
    """bool [batch, heads, queries, keys] in numpy, the truth for all others.

    ``q_pos`` [queries] and ``k_pos`` [keys]: global positions; ``offset``: global index of the first batch row and head.
    """
    import numpy as np

    k_pos = np.asarray(k_pos, np.uint64)
    groups = k_pos // np.uint64(LANES)
    counter = np.ix_(np.arange(batch) + offset[0], np.arange(heads) + offset[1], np.asarray(q_pos), groups)
    b, h, q, k = (np.asarray(x).astype(np.uint64) for x in counter)

    def multiply(a: Any, constant: int) -> tuple[Any, Any]:
        product = a * np.uint64(constant)
        return product >> np.uint64(32), product & np.uint64(WORD)

    low, high = map(np.uint64, seed_words(seed))
    words = philox((k, q, h, b), (low, high), multiply)
    lane = (k_pos % np.uint64(LANES)).astype(np.int64)
    shape = batch, heads, len(q_pos), len(k_pos)
    word = np.choose(lane, [np.broadcast_to(w, shape) for w in words])
    return word >= threshold(rate)
