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


def microseconds(
    works: Mapping[str, Work], calls: int = CALLS, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median host microseconds per call of each candidate, measured in turns by ``clock``."""
    order = random.Random(0)
    for work in works.values():
        _once(work, 5, clock)
        _once(work, calls, clock)
    measured: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name in order.sample(sorted(works), len(works)):
            measured[name].append(_once(works[name], calls, clock))
    return {name: statistics.median(times) for name, times in measured.items()}


def _once(work: Work, calls: int, clock: Callable[[], float]) -> float:
    _wait()
    began = clock()
    for _ in range(calls):
        work()
    taken = clock() - began
    _wait()
    return taken / calls * 1e6


def _wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
