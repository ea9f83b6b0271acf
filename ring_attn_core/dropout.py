"""The dropout mask of the attention probabilities: a pure function of the rate and the global (seed, batch, head, q_pos, k_pos).

The mask comes from the counter-based generator Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 3.3). Nothing is stored, and the mask is the same for every layout, ring, framework and backend:

    of_q, which = place_of_query(q_pos)                                     which: 0 or 1
    of_k, turn  = place_of_key(k_pos)                                       turn: 0 to 3
    key    = philox4x32(counter = (0, 0, head, batch), key = seed)[0]       the Philox key of a batch row and head
    words  = philox2x32(counter = (of_q, of_k), key = key)                  two words of 32 bits
    n      = the upper 16 bits of (words[which] rotated left by turn bytes)
    kept if n >= rate * 2^16

The rate is rounded to a multiple of 2^-16. Kept probabilities are multiplied by ``rescale(rate)`` = 1 / (1 - rounded rate).

One call of philox2x32 serves eight probabilities: queries q and q + 8 with keys k, k + 1, k + 8 and k + 9. When a tensor core
computes a 16 x 16 tile of scores, one GPU thread holds these eight, so it calls Philox once for them.

A 32-bit word gives four 16-bit numbers, one for each rotation. Each number is uniform, but the lower byte of one is the upper
byte of the next. Therefore the drops of two neighbouring numbers are correlated by at most 1/256, and not at all if the rate is
a multiple of 1/256. The correlation matters only at rates below 1/256: if a number is dropped, the next one is dropped with
probability 1/256 instead of the rate.

Seven rounds of philox2x32 are the fewest that pass BigCrush (table 2 of the paper). A key has 32 bits, so the probability
that any two of n (batch row, head) pairs share a key is about n^2 / 2^33.

The functions on words use only Python's integer operators, so they work on arrays of NumPy, PyTorch and JAX. Each framework
computes the 64-bit product of two words in its own way, so the caller passes a function ``multiply``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SPAN = 16
"""Length of the aligned spans of token positions: 0 to 15, 16 to 31, ... Positions with one Philox counter lie in one span."""

ROUNDS = 7
KEY_ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
MULTIPLIER_OF_2 = 0xD256D193
WEYL = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
HALF = 0xFFFF

Words = tuple[Any, ...]
Multiply = Callable[[Any, int], tuple[Any, Any]]


def philox4x32(
    counter: Words, key: Words, multiply: Multiply, word: Callable[[int], Any] = int, rounds: int = KEY_ROUNDS
) -> Words:
    """Return the four 32-bit words of Philox for a four-word counter and a two-word key, elementwise. ``multiply(a, constant)``
    returns the (upper, lower) 32 bits. Words are integers below 2^32, of dtype uint32 or wider; ``word`` converts a constant."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = multiply(c0, MULTIPLIERS[0])
        high1, low1 = multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + word(WEYL[0])) & word(WORD), (k1 + word(WEYL[1])) & word(WORD)
    return c0, c1, c2, c3


def philox2x32(counter: Words, key: Any, multiply: Multiply, word: Callable[[int], Any] = int, rounds: int = ROUNDS) -> Words:
    """Return the two 32-bit words of Philox for a two-word counter and a one-word key. Arguments as in ``philox4x32``."""
    c0, c1 = counter
    for _ in range(rounds):
        high, low = multiply(c0, MULTIPLIER_OF_2)
        c0, c1 = high ^ key ^ c1, low
        key = (key + word(WEYL[0])) & word(WORD)
    return c0, c1


def philox_key(seed: Words, batch: Any, head: Any, multiply: Multiply, word: Callable[[int], Any] = int) -> Any:
    """Return the 32-bit Philox key of a global batch row and head, made from the lower and upper 32 bits of the seed."""
    return philox4x32((head * 0, head * 0, head, batch), seed, multiply, word)[0]


def place_of_query(pos: Any) -> tuple[Any, Any]:
    """Return the counter word of a query position, and the index (0 or 1) of the output word of Philox that the position uses."""
    return pos // 16 * 8 + pos % 8, pos // 8 % 2


def place_of_key(pos: Any) -> tuple[Any, Any]:
    """Return the counter word of a key position, and the number of bytes (0 to 3) by which the output word is rotated."""
    return pos // 16 * 4 + pos % 8 // 2, pos // 8 % 2 * 2 + pos % 2


def number(word: Any, turn: Any) -> Any:
    """Return a 16-bit random number: the upper half of ``word`` after it is rotated left by ``turn`` bytes."""
    return (word << turn * 8 | word >> (32 - turn * 8) % 32) >> 16 & HALF


def threshold(rate: float) -> int:
    """Return the 16-bit threshold of the dropout mask: a probability is dropped if its random number is below the threshold."""
    return min(round(rate * 2**16), HALF)


def rescale(rate: float) -> float:
    """Return the factor by which kept probabilities are multiplied: 1 / P(a probability is kept)."""
    return 2**16 / (2**16 - threshold(rate))


def check_seed(seed: Any, first_batch: Any, first_head: Any) -> None:
    """Check that the seed fits int64 and that the global indices of the first row and head fit uint32; do not check arrays."""
    if isinstance(seed, int) and not -(2**63) <= seed < 2**63:
        raise ValueError(f"dropout_seed must fit in 64 bits with a sign, got {seed}: take it modulo 2**63")
    for name, x in (("first batch row", first_batch), ("first head", first_head)):
        if isinstance(x, int) and not 0 <= x <= WORD:
            raise ValueError(f"dropout_offset holds the global index of the {name}, 0 to 2**32 - 1, got {x}")


def seed_words(seed: Any) -> tuple[Any, Any]:
    """Return the lower and upper 32 bits of a seed, an int or a 64-bit integer array."""
    return seed & WORD, (seed >> 32) & WORD


def keep_mask(seed: int, rate: float, batch: int, heads: int, q_pos: Any, k_pos: Any, offset: tuple[int, int] = (0, 0)) -> Any:
    """Return the dropout mask that every backend must compute, bool [batch, heads, queries, keys]; True keeps a probability.
    Positions are global; ``offset`` holds the global indices of the first batch row and of the first head."""
    import numpy as np

    wide = lambda x: np.asarray(x).astype(np.uint64) & np.uint64(WORD)

    def multiply(a: Any, constant: int) -> tuple[Any, Any]:
        product = a * np.uint64(constant)
        return product >> np.uint64(32), product & np.uint64(WORD)

    q_slot, which = place_of_query(wide(q_pos)[:, None])
    k_slot, turn = place_of_key(wide(k_pos))
    b, h = wide(np.arange(batch) + offset[0])[:, None, None, None], wide(np.arange(heads) + offset[1])[:, None, None]
    key = philox_key((np.uint64(seed_words(seed)[0]), np.uint64(seed_words(seed)[1])), b, h, multiply)
    words = philox2x32((q_slot, k_slot), key, multiply)
    return number(np.where(which == 0, *words), turn) >= threshold(rate)
