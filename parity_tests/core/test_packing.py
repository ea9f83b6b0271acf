"""Packing against brute force: every token once and in order, no empty slot but in the last context, orders that never change."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn_core.data.index import DocumentSpan, PackedRows, shuffle

quick = settings(derandomize=True, deadline=None, max_examples=200)
lengths_of = st.lists(st.integers(1, 30), min_size=1, max_size=8)


@quick
@given(lengths_of, st.integers(1, 17), st.integers(0, 9))
def test_every_token_stands_in_one_place_and_in_order(lengths: list[int], length: int, seed: int):
    order = shuffle(len(lengths), seed)
    contexts = PackedRows(lengths, length, order)
    stream = [(document, token) for document in order for token in range(lengths[document])]
    held = []
    for number in range(len(contexts)):
        position = 0
        for piece in contexts.spans(number):
            assert piece.begin == position
            assert piece.count > 0
            position += piece.count
            held += [(piece.document, piece.first + i) for i in range(piece.count)]
        assert position == (length if number < len(contexts) - 1 else len(stream) - number * length)
    assert held == stream
    assert contexts.tokens == len(stream)
    assert contexts.spans(len(contexts)) == contexts.spans(len(contexts) + 5) == ()


def test_the_drawing_on_top_of_the_file_is_true():
    contexts = PackedRows([5, 2, 8, 4], 6)
    assert len(contexts) == 4
    assert contexts.spans(0) == (DocumentSpan(0, 0, 0, 5), DocumentSpan(1, 0, 5, 1))
    assert contexts.spans(1) == (DocumentSpan(1, 1, 0, 1), DocumentSpan(2, 0, 1, 5))
    assert contexts.spans(2) == (DocumentSpan(2, 5, 0, 3), DocumentSpan(3, 0, 3, 3))
    assert contexts.spans(3) == (DocumentSpan(3, 3, 0, 1),)


@pytest.mark.parametrize("spread", [30, 3_000, 30_000])
def test_packing_wastes_less_than_one_slot_in_a_hundred(spread: int):
    rng = random.Random(spread)
    contexts = PackedRows([rng.randint(1, spread) for _ in range(1_000)], 100)
    slots = len(contexts) * 100
    assert 0 <= slots - contexts.tokens < min(100, slots / 100)


@quick
@given(st.integers(0, 50), st.integers(-5, 5), st.integers(0, 5))
def test_an_order_holds_everything_once(count: int, seed: int, epoch: int):
    assert sorted(shuffle(count, "contexts", seed, epoch)) == list(range(count))


def test_an_order_is_the_same_for_ever_and_another_for_every_key():
    """Compare with fixed numbers: a run resumed with another release of Python or of this library needs the same order."""
    assert shuffle(8, "contexts", 0, 0) == shuffle(8, "contexts", 0, 0)
    keys = [("contexts", 0, 0), ("contexts", 0, 1), ("contexts", 1, 0), ("documents", 0, 0), ("contexts", -1, 0)]
    assert len({tuple(shuffle(20, *key)) for key in keys}) == len(keys)
    assert shuffle(8, "contexts", 0, 0) == [4, 2, 1, 5, 3, 6, 7, 0]
