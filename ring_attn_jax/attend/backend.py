"""The interface of a backend: three functions that each step of the ring calls.

``arguments.py`` chooses the backend, once per call.
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
    """The computation of attention over the keys of one shard; hashable, since it is a constant of the traced program."""

    apart: ClassVar[bool]
    """True if k and v may stay two arrays when nothing travels."""

    def attend(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State | None, last: bool) -> State:
        """Return ``total`` (None: no keys yet) with the visible ones of ``keys`` merged in.

        The state is float32 (float64 for float64); the ``last`` step returns out in q's dtype.
        """
        ...

    def cotangents(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State, dtotal: State) -> BackwardInputs:
        """Compute delta = rowsum(dout * out) - dlse, and return it with q, dout and lse; called once per backward.

        ``total``: (out, lse). ``dtotal``: (dout, dlse). The returned dout and delta are 0 for queries with lse -inf, which see
        no key: even a NaN in their cotangents must not reach any key.
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
        """Return ``dq`` (None: nothing yet) with the part of these keys added, and their dkv added to the result of ``arrived``.

        Both are in the accumulation dtype, or in q's dtype if nothing more will be added.
        """
        ...


def sink_gradient(score: Score, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
    """Return the gradient of the sinks [h], ``-sum_bs exp(sink - lse) delta`` with lse and delta [b s h]; None without sinks.

    A sink acts as a key whose value is 0.
    """
    if score.sinks is None:
        return None
    if lse.size == 0:  # zeros that depend on the sinks: XLA (jax 0.10, 0.11) fails on a shard_map of empty arrays only
        return jnp.where(score.sinks == 0, score.sinks, 0)
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(score.sinks.astype(lse.dtype)[None, None] - lse))
    return -jnp.sum(p * delta, (0, 1))
