"""Times of the prompt's chunks and of the new tokens."""

from __future__ import annotations

import statistics
import time
from typing import Any


class Watch:
    """Callbacks ``progress`` and ``on_token`` for ``generate`` that record seconds since construction."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.chunks: list[float] = []
        self.tokens: list[float] = []

    def progress(self, done: int, total: int) -> None:
        self.chunks.append(time.perf_counter() - self._began)

    def on_token(self, request: int, token: int) -> None:
        self.tokens.append(time.perf_counter() - self._began)

    def found(self) -> dict[str, Any]:
        """Return the seconds to the first token, to the end of each chunk, and per step.

        Keys: "step" and "worst" are the median and the largest of the later half of the steps.
        """
        gaps = [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]
        later = gaps[len(gaps) // 2 :]
        return {"first token": self.tokens[0], "chunks": self.chunks, "step": statistics.median(later), "worst": max(later)}
