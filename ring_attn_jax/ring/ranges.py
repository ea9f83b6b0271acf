"""Names of the ring's steps in JAX's profiler, shown at each operation of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax

from ring_attn_core.plan.step_names import step_name

from .step import Ring, Step


def named(ring: Ring, number: int, step: Step, suffix: str = "") -> AbstractContextManager[Any]:
    """Return a ``jax.named_scope`` for step ``number`` (from 1). It names operations while tracing: no cost at run time."""
    size = sum(x.size * x.dtype.itemsize for x in step.keys if x is not None)
    return jax.named_scope(step_name(ring.plan, number, step.shift, size) + suffix)
