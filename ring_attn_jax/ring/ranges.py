"""Names of the ring's steps in JAX's profiler. All operations of a step, except the transfer of keys, carry its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from ring_attn_core.plan.step_names import pass_name, step_name

from .step import Ring, Step


class RingPass:
    """A pass over a ring. ``name``: "forward" or "backward". As a context manager it does nothing in JAX."""

    def __init__(self, ring: Ring, name: str) -> None:
        self._ring, self._name, self._number = ring, name, 0

    def __enter__(self) -> RingPass:
        return self

    def __exit__(self, *_: object) -> None: ...

    def steps(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield the ``steps`` and count them from 1. The names from ``named`` contain this count."""
        self._number = 1
        for step in steps:
            yield step
            self._number += 1

    def named(self, step: Step) -> AbstractContextManager[Any]:
        """Return a ``jax.named_scope`` for the current step. It names operations during tracing, so it costs no run time."""
        size = sum(x.size * x.dtype.itemsize for x in step.keys if x is not None)
        return jax.named_scope(pass_name(step_name(self._ring.plan, self._number, step.shift, size), self._name))
