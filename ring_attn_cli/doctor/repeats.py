"""Timings of runs, which are functions that the caller passes.

After a warm-up, runs are timed in a series of rounds. Each round calls every run once. A noisy series is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from ring_attn_core.plan.machine import NOISE

REPEATS = 7
"""The number of timings of each run in a series."""

SERIES = 4
"""Largest number of series, each of ``REPEATS`` rounds, in a measurement."""

WARM_UP = 6
"""Largest number of warm-up rounds before the first series.

The warm-up ends earlier if the times of each run in two successive rounds have a relative difference of at most ``NOISE``.
"""

WORST = 10.0
"""Upper bound of a noise (a relative difference of times), and its value if a time is not above 0."""

SPARE = 60.0
"""Seconds for repeating noisy series, in all measurements together. Once they are spent, no further series starts."""


class Series(NamedTuple):
    """The median seconds of each run over a series of rounds, and the noise of the series.
    The noise is the largest of a run's: the relative difference of its medians over even and over odd rounds."""

    noise: float
    seconds: list[float]


class Repeats:
    """A timer that measures runs in a series of rounds, and in further series until one of them is quiet.
    ``noise``: the greatest of the quietest series so far. ``spare``: seconds for further series. ``on_any_rank``: whether a flag
    is set on any rank, so that ranks repeat together."""

    def __init__(self, spare: float = SPARE, now: Callable[[], float] = time.perf_counter) -> None:
        self.noise, self.spare, self.now = 0.0, spare, now
        self.on_any_rank: Callable[[bool], bool] = bool

    def seconds(self, runs: Sequence[Callable[[], float]]) -> list[float]:
        """Return the median seconds of each run in the quietest of up to ``SERIES`` series, and update ``noise``.
        Each round calls every run once, so that a slow change of the clock rate affects all alike. Series follow while some rank
        has spare seconds and only series noisier than ``NOISE``."""
        self._warm_up(runs)
        quietest = self._series(runs)
        for _ in range(SERIES - 1):
            if not self.on_any_rank(quietest.noise > NOISE and self.spare > 0):
                break
            began = self.now()
            quietest = min(quietest, self._series(runs))
            self.spare -= self.now() - began
        self.noise = max(self.noise, quietest.noise)
        return quietest.seconds

    def _warm_up(self, runs: Sequence[Callable[[], float]]) -> None:
        before = [run() for run in runs]
        for _ in range(WARM_UP - 1):
            after = [run() for run in runs]
            changed = max(difference(pair) for pair in zip(before, after, strict=True)) > NOISE
            if not self.on_any_rank(changed):
                break
            before = after

    def _series(self, runs: Sequence[Callable[[], float]]) -> Series:
        rounds = [[run() for run in runs] for _ in range(REPEATS)]
        times = list(zip(*rounds, strict=True))
        noise = max(difference((median(each[::2]), median(each[1::2]))) for each in times)
        return Series(noise, [median(each) for each in times])


def difference(seconds: Sequence[float]) -> float:
    """Return the longest time divided by the shortest, minus 1; at most ``WORST``."""
    return min(max(seconds) / min(seconds) - 1, WORST) if min(seconds) > 0 else WORST
