"""Document lengths of five batches, as packed training text has them: log-normal, median 1,340 tokens, sigma 1.3."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

BATCHES = 5
LEAST = 64


@cache
def _batches() -> list[list[int]]:
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    return [[int(tokens) for tokens in line.split()] for line in lines if not line.startswith("#")]


def packed_lengths(batch: int, length: int) -> list[int]:
    """Return the documents that fill ``length`` tokens, each of 64 tokens to a quarter of the length; the last is cut to fit."""
    documents: list[int] = []
    for tokens in _batches()[batch]:
        documents.append(min(max(tokens, LEAST), length // 4, length - sum(documents)))
        if sum(documents) == length:
            return documents
    raise ValueError(f"the committed lengths of a batch fill {sum(documents)} tokens, not {length}")


def long_tail(count: int) -> list[int]:
    """Return the lengths of a fine-tuning set: log-normal as above, but 2 % even up to 131,072 tokens, which is the longest."""
    rng = np.random.RandomState(0)
    lengths = np.clip(1340 * np.exp(1.3 * rng.standard_normal(count)), LEAST, 131_072)
    long = rng.random_sample(count) < 0.02
    lengths[long] = rng.uniform(1340, 131_072, long.sum())
    return lengths.astype(int).tolist()
