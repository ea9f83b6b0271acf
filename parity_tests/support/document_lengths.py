"""Document lengths of five batches, as packed training text has them: log-normal, median 1,340 tokens, sigma 1.3."""

from __future__ import annotations

from functools import cache
from pathlib import Path

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
