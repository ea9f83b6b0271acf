"""Timing of candidates on one GPU, in turns: at its power limit, a candidate that runs after a pause is up to 10 % faster."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], Any]

ROUND = 0.06
"""Seconds for which a candidate is measured in each turn."""

_order = random.Random(0)


def take_turns(
    works: dict[str, Work],
    rounds: int,
    measure: Callable[[Work, int], float] | None = None,
    slowest: Callable[[float], float] = float,
) -> dict[str, float]:
    """Return the median seconds per call of each candidate, over rounds in random order.

    The first third of each turn is not measured. ``measure``: ``seconds`` by default. ``slowest``: a function that returns the
    largest of all ranks' seconds, if candidates run on several processes; these then make equally many calls. The order is random
    because a candidate runs at a higher clock after a cool one: with one order for all cases, the same kernel differed by 5 %.
    """
    measure = measure or seconds
    calls = {}
    for name, work in works.items():
        seconds(work, 3)
        calls[name] = max(1, round(ROUND / slowest(seconds(work, 3))))
    measured: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name in _order.sample(sorted(works), len(works)):
            seconds(works[name], max(1, calls[name] // 2))
            measured[name].append(slowest(measure(works[name], calls[name])))
    return {name: statistics.median(times) for name, times in measured.items()}


def seconds(work: Work, calls: int) -> float:
    """Return the seconds per call of ``calls`` calls in a row."""
    _wait()
    began = time.perf_counter()
    for _ in range(calls):
        result = work()
    jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
    _wait()
    return (time.perf_counter() - began) / calls


def _wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_seconds(work: Work, calls: int) -> float:
    """Return the GPU seconds per call of ``calls`` calls, from CUPTI, which records the kernels of both frameworks."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        seconds(work, calls)
    on_device = [event for event in seen.events() or [] if event.device_type.name == "CUDA"]
    return sum(event.time_range.elapsed_us() for event in on_device) / calls / 1e6


def peak_bytes(work: Work) -> int:
    """Return the largest memory that PyTorch allocates on the GPU during a call, beyond what it held before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth() -> float:
    """Return the bytes/s, read and written, of a copy of 2 GiB."""
    x = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / take_turns({"copy": lambda: y.copy_(x)}, 5)["copy"]
