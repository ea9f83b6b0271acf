"""When the prompt's chunks and the new tokens came."""

from __future__ import annotations

import statistics
import time
from typing import Any


class Watch:
    """Given to ``generate`` as ``progress`` and ``on_token``; seconds from when this was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.chunks: list[float] = []
        self.tokens: list[float] = []

    def progress(self, done: int, total: int) -> None:
        self.chunks.append(time.perf_counter() - self._began)

    def on_token(self, request: int, token: int) -> None:
        self.tokens.append(time.perf_counter() - self._began)

    def found(self) -> dict[str, Any]:
        """Seconds to the first token, at every chunk's end, and of a step: the median of the later half's, and their worst."""
        gaps = [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]
        later = gaps[len(gaps) // 2 :]
        return {"first token": self.tokens[0], "chunks": self.chunks, "step": statistics.median(later), "worst": max(later)}
