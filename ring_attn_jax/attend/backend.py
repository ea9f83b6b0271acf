"""The interface of a backend: three functions that each step of the ring calls.

``call/prepare.py`` chooses the backend, once per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from .keys import Keys
from .score import Score
from .state import BackwardInputs, Gradients, State


class Backend(Protocol):
    """An implementation of attention over the keys of one shard. It is hashable, as a constant of the traced program."""

    two_arrays: ClassVar[bool]
    """True if k and v may stay two arrays when no keys travel between ranks."""

    def attend(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State | None, last: bool) -> State:
        """Merge attention to the visible keys into ``total``, the state so far (None: no keys yet), and return it.

        The state is float32 (float64 for float64); after the ``last`` step out is in q's dtype. It has a rest if
        ``carries_rest(q.dtype)``.
        """
        ...

    def backward_inputs(
        self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State, dtotal: State
    ) -> BackwardInputs:
        """Compute delta = rowsum(dout * out) - dlse, and return it with q, dout and lse. The loop calls it once per backward.

        ``total``: the state after the last step; ``dtotal``: (dout, dlse). A probability is ``exp(s - lse - rest)``, and each
        gradient multiplies it by dout or delta. So dout and delta are returned times ``exp(-rest)``, and the steps compute
        ``exp(s - lse)``. Both are 0 for queries that see no key, so that NaN in their incoming gradients reaches no key.
        """
        ...

    def attend_backward(
        self,
        of_q: BackwardInputs,
        keys: Keys,
        rows: jax.Array,
        score: Score,
        dq: jax.Array | None,
        arrived: Callable[[], jax.Array | None],
        last: bool,
    ) -> tuple[jax.Array, Gradients]:
        """Add the contribution of ``keys`` to ``dq`` (None: nothing yet), and dk and dv to the gradients from ``arrived()``.

        Return both, in q's dtype if nothing more will be added, else in the accumulation dtype.
        """
        ...


def sink_gradient(score: Score, total: State, delta: jax.Array) -> jax.Array | None:
    """Return the gradient of the sinks [h], or None without sinks.

    It is ``-sum_bs exp(sink - lse - rest) delta`` over arrays [b s h], since a sink is a key whose value is 0.
    """
    if score.sinks is None:
        return None
    lse = total.lse
    if lse.size == 0:  # zeros that depend on the sinks: XLA (jax 0.10, 0.11) fails on a shard_map of empty arrays only
        return jnp.where(score.sinks == 0, score.sinks, 0)
    log_p = score.sinks.astype(lse.dtype)[None, None] - lse
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(log_p if total.rest is None else log_p - total.rest))
    return -jnp.sum(p * delta, (0, 1))
