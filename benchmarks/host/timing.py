"""Host time: the time of the calls themselves, while the GPU works asynchronously."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Work = Callable[[], Any]
ROUNDS, CALLS = 21, 40
"""Number of rounds in random order, and of consecutive calls: few enough for the GPU's queue, so that the host never waits."""


def microseconds(works: Mapping[str, Work], calls: int = CALLS) -> dict[str, float]:
    """Return the median host microseconds per call of each candidate, measured in turns."""
    order = random.Random(0)
    for work in works.values():
        _once(work, 5)
        _once(work, calls)
    measured: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name in order.sample(sorted(works), len(works)):
            measured[name].append(_once(works[name], calls))
    return {name: statistics.median(times) for name, times in measured.items()}


def _once(work: Work, calls: int) -> float:
    _wait()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    taken = time.perf_counter() - began
    _wait()
    return taken / calls * 1e6


def _wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
