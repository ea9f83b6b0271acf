"""The ring loop: k/v shards travel from rank to rank, each rank attends to visible keys, and gradients return to the keys' owner.

The strategy decides which arrays travel; the docstring of ``strategies/ring.py`` lists those of a ring, forward and backward.
``RingPass`` names the steps for a profiler.

``forward`` and ``backward`` have the same source text as those of ``ring_attn_torch``, except for the name of an array's type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from ring_attn_core.plan.step_names import pass_name, step_name

from ..attend.backend import Backend
from ..attend.keys import Keys
from ..attend.score import Score
from ..attend.state import Gradients, State
from . import by_heads
from .step import Ring, Step
from .strategies import STRATEGIES


class RingPass:
    """A pass over a ring. ``name``: "forward" or "backward". As a context manager it does nothing in JAX."""

    def __init__(self, ring: Ring, name: str) -> None:
        self.ring, self._name, self._number = ring, name, 0

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
        return jax.named_scope(pass_name(step_name(self.ring.plan, self._number, step.shift, size), self._name))


def forward(q: jax.Array, keys: Keys, score: Score, ring: Ring, backend: Backend, total: State | None = None) -> State:
    """Attend from this rank's queries to all visible keys. Return out [b s h e] in q's dtype, lse and its rounding error [b s h].

    lse and its rounding error are float32, or float64 for float64 q; the error is None for 16-bit q. ``q`` [b s h d],
    ``keys`` [b t g d+e]: this rank's shards. ``total``: the results so far, over other keys and the sinks, with out in
    lse's dtype; attention continues from them. None: start from the sinks alone.
    """
    with RingPass(ring, "forward") as this:
        if ring.plan.groups > 1:
            return by_heads.forward(this, q, keys, score, backend, total)
        strategy = STRATEGIES[ring.strategy]
        (q, *state), keys, score = strategy.spread((q, *(total.arrays if total else ())), keys, score, ring)
        total = State(*state) if state else None
        for step in this.steps(strategy.circulate(keys, ring)):
            with this.named(step):
                total = step.settle(backend.attend(q, step.keys, step.rows, score, total, last=step.last))
        assert total is not None
        return State(*strategy.collect(total.arrays, ring))


def backward(
    q: jax.Array, keys: Keys, total: State, dtotal: State, score: Score, ring: Ring, backend: Backend
) -> tuple[jax.Array, Gradients, jax.Array | None]:
    """Return dq [b s h d], dkv [b t g d+e] or (dk, dv), and the gradient of the sinks [h].

    ``total``: the state after the forward pass. ``dtotal``: the gradients of out and lse. dq and dkv are the gradients of this
    rank's own shards. They are in q's dtype if no other rank contributes to them, else in float32 (float64 if q is). The sinks'
    gradient is this rank's contribution to the sum over the ranks; None without sinks.
    """
    with RingPass(ring, "backward") as this:
        if ring.plan.groups > 1:
            return by_heads.backward(this, q, keys, total, dtotal, score, backend)
        strategy = STRATEGIES[ring.strategy]
        (q, dout, dlse, *state), keys, score = strategy.spread((q, *dtotal.arrays, *total.arrays), keys, score, ring)
        query = dq = None
        for step in this.steps(strategy.circulate(keys, ring)):
            with this.named(step):
                if query is None:
                    query = backend.backward_inputs(q, keys, step.rows, score, State(*state), State(dout, dlse))
                gradients = backend.attend_backward(query, step.keys, step.rows, score, dq, step.arrived, last=step.last)
                dq, dkv = step.settle(gradients)
                step.send_home(dkv)
        assert query is not None and dq is not None
        return strategy.collect_gradients(dq, step.home(), query, ring)
