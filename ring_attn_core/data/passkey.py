"""Passkey texts, which test attention over long distances: filler that hides a number, and a question for it at the end."""

from __future__ import annotations

import random
from typing import NamedTuple

from ..validation import in_words, is_integer

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is "


class Passkey(NamedTuple):
    """A sample of the passkey task, a byte a token: filler with a hidden number, a question for it, and the number as answer."""

    text: bytes
    answer: int
    """The index in ``text`` of the answer's first byte; the answer ends the text."""
    depth: float
    """The place of the hidden number in the filler: 0 is the beginning, 1 the end."""

    @property
    def labels(self) -> list[int]:
        """Return a label for each token: the next byte if that byte belongs to the answer, else -100."""
        following = [*self.text[1:], -100]
        return [token if at + 1 >= self.answer else -100 for at, token in enumerate(following)]


def shortest(digits: int = 5) -> int:
    """Return the length in bytes of a passkey text without filler, for a number of ``digits`` digits."""
    return len(NEEDLE.format(key="0" * digits)) + len(QUESTION) + digits


def passkey(length: int, seed: int | str = 0, digits: int = 5) -> Passkey:
    """Return a text of ``length`` bytes that hides a number of ``digits`` digits at a uniformly random depth.
    As in arXiv:2305.16300 it is filler, number, filler, question, number. Equal arguments give equal texts on any machine."""
    for name, value, least in (("digits", digits, 1), ("length", length, shortest(digits) if is_integer(digits) else 1)):
        if not is_integer(value) or value < least:
            raise ValueError(f"{name} of a passkey must be an int of at least {least}, got {in_words(value)}")
    rng = random.Random(f"{seed} {length} {digits}")
    depth, key = rng.random(), "".join(rng.choices("0123456789", k=digits))
    filler = FILLER * (length // len(FILLER) + 1)
    before = round(depth * (length - shortest(digits)))
    after = length - shortest(digits) - before
    text = filler[:before] + NEEDLE.format(key=key) + filler[:after] + QUESTION + key
    return Passkey(text.encode(), length - digits, depth)
