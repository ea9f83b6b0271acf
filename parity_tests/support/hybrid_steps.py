"""Prompts in chunks and new tokens of a hybrid model's cache, compared with the model on all tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .recurrences import relative

IDS = np.random.default_rng(5).integers(0, 31, (2, 64))
CHUNK, NEW = 13, 3
Calls = Sequence[tuple[str, Any]]
CALLS: Calls = [
    ("prompts", [13, 5]),  # the first chunk, padded
    ("prompts", [2, 9]),  # shorter than a convolution
    ("prompts", [0, 3]),  # a row of padding only
    ("tokens", [[True], [True]]),
    ("tokens", [[True, False, True], [False, False, True]]),  # padding on the left and between tokens
    ("tokens", [[False], [True]]),
    ("tokens", [[True], [True]]),
]
"""The steps of a cache: chunks of at most CHUNK tokens by their lengths, at most NEW tokens by whether they are real."""


def errors(prompts: Any, tokens: Any, expected: np.ndarray, calls: Calls = CALLS) -> list[float]:
    """Return the relative errors of the logits of each call. ``prompts(ids, lengths)`` and ``tokens(ids, valid)`` append to a
    cache and return logits [2, vocab] and [2, tokens, vocab]; ``expected``: the model's logits [2, 64, vocab]."""
    ends, found = [0, 0], []
    for kind, what in calls:
        if kind == "prompts":
            ids = np.zeros((2, max(what)), np.int64)
            for row, n in enumerate(what):
                ids[row, :n] = IDS[row, ends[row] : ends[row] + n]
            logits = prompts(ids, what)[:, None]
            real = [[n > 0] for n in what]
            ends = [end + n for end, n in zip(ends, what, strict=True)]
            places = [[end - 1] for end in ends]
        else:
            real = what
            places = [[end + sum(row[:t]) for t in range(len(row))] for end, row in zip(ends, what, strict=True)]
            ids = np.array([[IDS[row, p] for p in of_row] for row, of_row in enumerate(places)])
            logits = tokens(ids, np.array(real))
            ends = [end + sum(row) for end, row in zip(ends, real, strict=True)]
        for row, of_row in enumerate(real):
            found += [relative(logits[row, t], expected[row, places[row][t]]) for t, there in enumerate(of_row) if there]
    return found
