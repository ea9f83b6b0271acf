"""The generator against its authors' known answers, and what dropout keeps against chance."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ring_attn_core.dropout import (
    WORD,
    keep_mask,
    number,
    philox2x32,
    philox4x32,
    place_of_key,
    place_of_query,
    rescale,
    seed_words,
    threshold,
)

FOUR = {
    7: (
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ),
    10: (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ),
}
TWO = {
    7: (
        ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
        ((WORD, WORD), WORD, (0xAB302C4D, 0x3DC9D239)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
    ),
    10: (
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((WORD, WORD), WORD, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ),
}
"""By rounds, counter, key and answer of philox4x32 and philox2x32: the vectors that come with Random123, the authors' library."""

SEEDS = (0, 1, 2**32, 2**32 + 1, 2**63 - 1, -1, -(2**63))
SHAPE = 3, 4, 64, 60
"""Batch rows, heads, queries, keys of a draw: 46,080 in all."""


def draw(seed: int = 0, rate: float = 0.3, **arguments) -> np.ndarray:
    b, h, s, t = SHAPE
    return keep_mask(seed, rate, b, h, range(s), range(t), **arguments)


def multiply(a: int, constant: int) -> tuple[int, int]:
    return divmod(a * constant, 2**32)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of chance: about 1 for draws that have nothing to do with each other."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * a.size**0.5)


@pytest.mark.parametrize(("philox", "answers"), [(philox4x32, FOUR), (philox2x32, TWO)])
def test_philox_gives_the_known_answers(philox, answers):
    for rounds, known in answers.items():
        for counter, key, answer in known:
            assert philox(counter, key, multiply, rounds=rounds) == answer


@pytest.mark.parametrize("seed", SEEDS)
def test_a_probability_is_kept_where_its_number_is_at_least_the_rate(seed):
    """The definition, in Python's own integers."""
    queries, keys = [0, 5, 8, 2**20], [0, 1, 2, 8, 9, 27, 31, 32, 77, 2**20 + 3]
    keeps = keep_mask(seed, 0.3, 2, 2, queries, keys)
    for b, h, i, j in np.ndindex(keeps.shape):
        (of_q, which), (of_k, turn) = place_of_query(queries[i]), place_of_key(keys[j])
        key = philox4x32((0, 0, h, b), (seed % 2**32, seed // 2**32 % 2**32), multiply)[0]
        word = philox2x32((of_q, of_k), key, multiply)[which]
        twice = word * 2**32 + word
        assert keeps[b, h, i, j] == (twice // 2 ** (48 - 8 * turn) % 2**16 >= 0.3 * 2**16)


def test_every_position_has_a_place_of_its_own():
    """Count eight words for 16 queries, one for q and q + 8, and four for 16 keys. Keys k, k + 1, k + 8 and k + 9 share one."""
    for place, words, sharing in (place_of_query, 48, [21, 29]), (place_of_key, 24, [18, 19, 26, 27]):
        places = [place(p) for p in range(96)]
        assert len(set(places)) == 96
        assert {word for word, _ in places} == set(range(words))
        assert [p for p in range(96) if place(p)[0] == place(sharing[0])[0]] == sharing


def test_the_numbers_of_a_word_overlap_by_a_byte():
    assert [number(0x12345678, turn) for turn in range(4)] == [0x1234, 0x3456, 0x5678, 0x7812]


@pytest.mark.parametrize("rate", [2**-16, 1e-3, 0.1, 0.25, 0.3, 0.5, 0.9, 0.999])
def test_the_shared_byte_of_two_numbers_correlates_them_by_1_in_256_at_most(rate):
    """Exactly, over all bytes: of the shared one, of that above it in the one number, of that below it in the other."""
    shared, other = np.arange(256)[:, None], np.arange(256)
    numbers = number(other << 24 | shared << 16, 0), number(shared << 16 | other << 8, 1)
    dropped = [(n < threshold(rate)).mean(1) for n in numbers]
    p = dropped[0].mean()
    assert p == dropped[1].mean() == threshold(rate) / 2**16
    assert abs((dropped[0] * dropped[1]).mean() - p**2) <= p * (1 - p) / 256


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.1, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_share_dropped_is_the_rate(seed, rate):
    dropped = ~draw(seed, rate)
    assert abs(dropped.mean() - rate) <= 5 * (rate * (1 - rate) / dropped.size) ** 0.5


def test_the_rate_is_rounded_to_sixteen_bits():
    assert threshold(0.0) == 0
    assert threshold(0.5) == 2**15
    assert threshold(1 - 1e-12) == 2**16 - 1


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.1, 0.5, 0.999, 1 - 1e-12])
def test_kept_probabilities_are_scaled_up_by_the_share_that_is_kept(rate):
    assert rescale(rate) * (2**16 - threshold(rate)) / 2**16 == 1


@pytest.mark.parametrize("axis", range(4), ids=["batch rows", "heads", "queries", "keys"])
def test_neighbours_are_independent(axis):
    """At the distances 1 to 40: within a word, among a counter's words, and across counters."""
    keeps = draw()
    for distance in range(1, min(41, SHAPE[axis])):
        a, b = (np.take(keeps, range(first, first + SHAPE[axis] - distance), axis) for first in (0, distance))
        assert abs(correlation(a, b)) <= 5, distance


@pytest.mark.parametrize("axis", range(4), ids=["batch row", "head", "query", "key"])
def test_every_slice_keeps_its_share(axis):
    """As it would not if a coordinate were mixed in badly: chi squared of the shares, 5 sigma."""
    keeps = draw(seed=3)
    others = tuple(i for i in range(4) if i != axis)
    deviations = (keeps.mean(others) - 0.7) / (0.21 * SHAPE[axis] / keeps.size) ** 0.5
    freedom = SHAPE[axis]
    assert abs((deviations**2).sum() - freedom) <= 5 * (2 * freedom) ** 0.5


def test_swapping_two_coordinates_gives_another_draw():
    square = keep_mask(0, 0.5, 24, 24, range(24), range(24))
    where = np.indices(square.shape)
    for a, b in combinations(range(4), 2):
        above = where[a] < where[b]
        assert abs(correlation(square[above], square.swapaxes(a, b)[above])) <= 5, (a, b)


def test_seeds_are_independent():
    """Those that differ in the upper word or the sign only, too."""
    draws = {seed: draw(seed) for seed in SEEDS}
    for a, b in combinations(SEEDS, 2):
        assert abs(correlation(draws[a], draws[b])) <= 5, (a, b)


def test_seeds_are_64_bits_in_two_s_complement():
    assert seed_words(-1) == (WORD, WORD)
    assert seed_words(2**32 + 5) == (5, 1)
    assert seed_words(-(2**63)) == (0, 2**31)


def test_offsets_and_positions_are_global():
    """A part of the batch rows, heads, queries and keys keeps what the whole keeps there."""
    part = keep_mask(0, 0.3, 2, 2, range(7, 30), range(5, 50, 3), offset=(1, 2))
    np.testing.assert_array_equal(part, draw()[1:3, 2:4, 7:30, 5:50:3])


def test_indices_begin_again_after_32_bits():
    last = 2**32 - 1
    for offset in ((last, 0), (0, last)):
        beyond = keep_mask(0, 0.3, 2, 2, range(8), range(8), offset=offset)[1:, 1:]
        inside = keep_mask(0, 0.3, 1, 1, range(8), range(8), offset=tuple((x + 1) % 2**32 for x in offset))
        np.testing.assert_array_equal(beyond, inside)
