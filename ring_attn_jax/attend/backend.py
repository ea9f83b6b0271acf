"""What a backend is: three functions, which every step of the ring calls. Who they are is decided once, in ``arguments.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from .keys import Keys
from .score import Score
from .state import Cotangents, Gradients, State


class Backend(Protocol):
    """Whoever computes attention over the keys of one shard; hashable, since it is a constant of the traced program."""

    apart: ClassVar[bool]
    """Whether k and v may stay two arrays where nothing travels."""

    def attend(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State | None, last: bool) -> State:
        """Return ``total`` (None: of no keys yet) with the visible ones of ``keys`` merged in.

        The state is float32 (float64 for float64); the ``last`` step gives out in q's dtype.
        """
        ...

    def cotangents(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State, dtotal: State) -> Cotangents:
        """Return what every step of the backward needs of the queries, from (out, lse) and (dout, dlse); once per backward.

        It is 0 for queries that see nothing: what reaches them, NaN too, concerns no key.
        """
        ...

    def attend_backward(
        self,
        of_q: Cotangents,
        keys: Keys,
        rows: jax.Array,
        score: Score,
        dq: jax.Array | None,
        arrived: Callable[[], jax.Array | None],
        last: bool,
    ) -> tuple[jax.Array, Gradients]:
        """Return ``dq`` (None: nothing yet) with the part of these keys, and their dkv added to what ``arrived`` for them.

        Both are in the accumulation dtype, or in q's where nothing will be added any more.
        """
        ...


def sink_gradient(score: Score, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
    """Return [h] of ``-sum_bs exp(sink - lse) delta``, all [b s h]: a sink is a key whose value is 0. None without sinks."""
    if score.sinks is None:
        return None
    if lse.size == 0:  # zeros, made of the sinks: XLA (jax 0.10, 0.11) fails on a shard_map that uses only empty arrays
        return jnp.where(score.sinks == 0, score.sinks, 0)
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(score.sinks.astype(lse.dtype)[None, None] - lse))
    return -jnp.sum(p * delta, (0, 1))
