"""Host time: how long the calls themselves take, while the GPU works behind them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Work = Callable[[], Any]
ROUNDS, CALLS = 21, 40
"""Rounds of random order; calls of a candidate in a row, which the GPU's queue holds without making the host wait."""


def microseconds(works: Mapping[str, Work], calls: int = CALLS) -> dict[str, float]:
    """Median host microseconds of a call of each, in turns."""
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
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return taken / calls * 1e6
