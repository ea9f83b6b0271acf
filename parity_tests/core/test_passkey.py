"""Texts with passkeys: as long as asked, with the number where the record says, and labels at the answer alone."""

from __future__ import annotations

import re

import pytest

from ring_attn_core.data.passkey import QUESTION, passkey, shortest


@pytest.mark.parametrize("digits", [1, 5])
@pytest.mark.parametrize("more", [0, 1, 90, 1001])
def test_a_text_has_its_length_and_asks_for_the_number_that_it_hides(more: int, digits: int):
    length = shortest(digits) + more
    for seed in range(5):
        found = passkey(length, seed, digits)
        text = found.text.decode()
        hidden = re.findall(rf"The pass key is (\d{{{digits}}})\. Remember it", text)
        assert len(text) == length
        assert hidden == [text[found.answer :]]
        assert text[: found.answer].endswith(QUESTION)
        assert abs(text.index("The pass key is") - found.depth * more) <= 0.5


def test_labels_are_the_answer_one_token_before_it():
    found = passkey(300, 3)
    assert len(found.labels) == 300
    assert found.labels[:-6] == [-100] * 294
    assert found.labels[-6:] == [*found.text[-5:], -100]


def test_equal_arguments_give_equal_texts_and_seeds_numbers_and_depths():
    assert passkey(500, 7) == passkey(500, 7)
    many = [passkey(500, seed) for seed in range(50)]
    assert len({each.text[each.answer :] for each in many}) == 50
    assert min(each.depth for each in many) < 0.1 < 0.9 < max(each.depth for each in many)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": shortest() - 1}, f"length of a passkey must be an int of at least {shortest()}, got {shortest() - 1}"),
        ({"length": 300, "digits": 0}, "digits of a passkey must be an int of at least 1, got 0"),
        ({"length": "300"}, "length of a passkey must be an int"),
        ({"length": 300, "digits": 1.5}, "digits of a passkey must be an int of at least 1, got 1.5"),
    ],
)
def test_invalid_arguments_of_passkey_are_refused(arguments: dict, words: str):
    with pytest.raises(ValueError, match=words):
        passkey(**arguments)
