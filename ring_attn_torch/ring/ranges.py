"""Named ranges around the steps of a ring, for torch.profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from ring_attn_core.plan.step_names import step_name

from .groups import rank_in
from .step import Ring, Step


def named(ring: Ring, number: int, step: Step, suffix: str = "") -> AbstractContextManager[Any]:
    """Return a torch.profiler range for step ``number`` (from 1), or a null context if no profiler runs."""
    if not profiler._is_profiler_enabled:  # a range costs microseconds even without a profiler
        return nullcontext()
    size = sum(x.nbytes for x in step.keys if x is not None)
    return profiler.record_function(step_name(ring.plan, number, step.shift, size, rank_in(ring.group)) + suffix)
