"""Which attention probabilities dropout keeps: a pure function of (seed, batch, head, q_pos, k_pos), all of them global.

The counter-based generators Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3), so that
nothing is stored, and the kept set is the same for every layout, ring, framework and backend:

    stream = philox4x32(counter = (0, 0, head, batch), key = seed)[0]              one for every batch row and head
    words  = philox2x32(counter = (of_q, of_k), key = stream)                      of_q, which = place_of_query(q_pos)
    n      = the upper 16 bits of words[which], rotated left by turn bytes         of_k, turn  = place_of_key(k_pos)
    kept where n >= rate 2^16

So the rate is rounded to a multiple of 2^-16, and what is kept is scaled up by ``rescale``, which belongs to that. One counter
serves queries q and q + 8 with keys k, k + 1, k + 8 and k + 9: the eight probabilities of 16 x 16 that one thread of a GPU holds
in the result of a matrix product of which queries are the rows. Four numbers of 16 bits come from a word of 32: the lower byte of
one is the upper byte of the next, so that every one is as likely as it should be, and two of a word are correlated by at most
1/256 (where the rate is a multiple of 1/256, not at all). It shows where the rate itself is that small: below 1/256, where one of
a word is dropped, the next is with a probability of 1/256. Seven rounds are the fewest that pass BigCrush (table 2 of the paper).
A stream is one word: of n batch rows and heads some two share theirs with a chance of n^2 / 2^33.

One function of ``+ & | ^ << >>`` works on numpy, torch and jnp; only the 64-bit product differs, so it is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SPAN = 16
"""Positions from a multiple of it on share counters with each other and with no others."""

ROUNDS = 7
STREAM_ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
MULTIPLIER_OF_2 = 0xD256D193
WEYL = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
HALF = 0xFFFF

Words = tuple[Any, ...]
Multiply = Callable[[Any, int], tuple[Any, Any]]


def philox4x32(
    counter: Words, key: Words, multiply: Multiply, word: Callable[[int], Any] = int, rounds: int = STREAM_ROUNDS
) -> Words:
    """The four 32-bit words of a counter of four and a key of two, elementwise.

    ``multiply(a, constant)`` gives the (upper, lower) 32 bits of the product. Words are below 2^32 in whatever integers the
    caller has, wider or uint32; ``word`` makes one of a constant.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = multiply(c0, MULTIPLIERS[0])
        high1, low1 = multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + word(WEYL[0])) & word(WORD), (k1 + word(WEYL[1])) & word(WORD)
    return c0, c1, c2, c3


def philox2x32(counter: Words, key: Any, multiply: Multiply, word: Callable[[int], Any] = int, rounds: int = ROUNDS) -> Words:
    """The two words of a counter of two and a key of one; otherwise like ``philox4x32``."""
    c0, c1 = counter
    for _ in range(rounds):
        high, low = multiply(c0, MULTIPLIER_OF_2)
        c0, c1 = high ^ key ^ c1, low
        key = (key + word(WEYL[0])) & word(WORD)
    return c0, c1


def stream(seed: Words, batch: Any, head: Any, multiply: Multiply, word: Callable[[int], Any] = int) -> Any:
    """The key by which the probabilities of a batch row and head are drawn; ``seed``: its two words."""
    return philox4x32((head * 0, head * 0, head, batch), seed, multiply, word)[0]


def place_of_query(pos: Any) -> tuple[Any, Any]:
    """A query's word of the counter, and which of the two words drawn is for it, 0 or 1."""
    return pos // 16 * 8 + pos % 8, pos // 8 % 2


def place_of_key(pos: Any) -> tuple[Any, Any]:
    """A key's word of the counter, and by how many bytes what is drawn turns for it, 0 to 3."""
    return pos // 16 * 4 + pos % 8 // 2, pos // 8 % 2 * 2 + pos % 2


def number(word: Any, turn: Any) -> Any:
    """The upper 16 bits of a word rotated left by ``turn`` bytes."""
    return (word << turn * 8 | word >> (32 - turn * 8) % 32) >> 16 & HALF


def threshold(rate: float) -> int:
    """The least number of 16 bits that is kept: a share ``rate`` of them is below it."""
    return min(round(rate * 2**16), HALF)


def rescale(rate: float) -> float:
    """What kept probabilities are multiplied by: 1 over the share of numbers that are kept."""
    return 2**16 / (2**16 - threshold(rate))


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

    wide = lambda x: np.asarray(x).astype(np.uint64) & np.uint64(WORD)

    def multiply(a: Any, constant: int) -> tuple[Any, Any]:
        product = a * np.uint64(constant)
        return product >> np.uint64(32), product & np.uint64(WORD)

    of_q, which = place_of_query(wide(q_pos)[:, None])
    of_k, turn = place_of_key(wide(k_pos))
    b, h = wide(np.arange(batch) + offset[0])[:, None, None, None], wide(np.arange(heads) + offset[1])[:, None, None]
    key = stream((np.uint64(seed_words(seed)[0]), np.uint64(seed_words(seed)[1])), b, h, multiply)
    words = philox2x32((of_q, of_k), key, multiply)
    return number(np.where(which == 0, *words), turn) >= threshold(rate)
