"""Names of the ring's steps, for the ranges of torch.profiler and for ``LostRank``, the error of a transfer that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from torch.autograd import profiler

from ring_attn_core.plan.step_names import pass_name, place_name, step_name

from .groups import rank_in
from .step import Ring, Step
from .transfer import LostRank

NOT_PROFILED = nullcontext()


class RingPass:
    """A pass over a ring, "forward" or "backward". As a context it adds the pass and the step to the message of a LostRank."""

    def __init__(self, ring: Ring, name: str) -> None:
        self._ring, self._name, self._number = ring, name, 0

    def __enter__(self) -> RingPass:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, LostRank):
            error.args = (f"{place_name(self._ring.plan, self._number)}, {self._name}: {error}",)

    def steps(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield the ``steps``, and count them from 1 for profiler ranges and LostRank errors, also while keys are awaited."""
        self._number = 1
        for step in steps:
            yield step
            self._number += 1

    def named(self, step: Step) -> AbstractContextManager[Any]:
        """Return a torch.profiler range for the current step, or a null context if no profiler runs."""
        if not profiler._is_profiler_enabled:  # a range costs microseconds even without a profiler
            return NOT_PROFILED
        size = sum(x.nbytes for x in step.keys if x is not None)
        name = step_name(self._ring.plan, self._number, step.shift, size, rank_in(self._ring.group))
        return profiler.record_function(pass_name(name, self._name))
