"""The interface of a backend: the three functions that the ring loop (``ring/loop.py``) calls.

``compile_call`` of ``call/decide.py`` selects the backend of a call.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from .keys import Keys
from .score import Score
from .state import Arrived, BackwardInputs, Gradients, State


class Backend(Protocol):
    """An implementation of attention over the keys of one shard. Instances are hashable, because jit treats them as constants."""

    two_arrays: ClassVar[bool]
    """True if k and v may stay two arrays when no keys travel between ranks."""

    def attend(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State | None, last: bool) -> State:
        """Merge attention to the visible keys into ``total`` (None before the first step), and return the new state.
        It is float32 (float64 for float64 inputs); after the ``last`` step ``out`` is in q's dtype."""
        ...

    def backward_inputs(
        self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State, dtotal: State
    ) -> BackwardInputs:
        """Return the inputs that all steps of a backward share, with delta = rowsum(dout * out) - dlse. ``dtotal``: (dout, dlse).

        Steps compute ``exp(s - lse)``; this function scales dout and delta by ``exp(-rest)``. dout and delta may be NaN for a
        query that sees no key: no such NaN may reach the gradients of keys and sinks, even if sinks make its lse finite.
        """
        ...

    def attend_backward(
        self, query: BackwardInputs, keys: Keys, rows: jax.Array, score: Score, dq: jax.Array | None, arrived: Arrived, last: bool
    ) -> tuple[jax.Array, Gradients]:
        """Add the contribution of ``keys`` to ``dq`` (None before the first step), and dk and dv to what ``arrived()`` returns.
        These are their gradients from other ranks' queries, or None. Until complete, all are float32 (float64 if inputs are)."""
        ...


def sink_gradient(score: Score, total: State, delta: jax.Array) -> jax.Array | None:
    """Return the gradient of the sinks [h], ``-sum_bs exp(sink - lse - rest) delta``: a sink is a key whose value is 0."""
    if score.sinks is None:
        return None
    lse = total.lse
    if lse.size == 0:  # zeros that depend on the sinks: XLA (jax 0.10, 0.11) fails on a shard_map of empty arrays only
        return jnp.where(score.sinks == 0, score.sinks, 0)
    log_p = score.sinks.astype(lse.dtype)[None, None] - lse
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(log_p if total.rest is None else log_p - total.rest))
    return -jnp.sum(p * delta, (0, 1))
