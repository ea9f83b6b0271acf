"""The peak of torch's allocations on the CPU, counted by its profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most that torch has allocated on the CPU at a time while ``function`` runs, beside what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        function()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()  # type: ignore[attr-defined]
            most = max(most, held)
    return most
