"""The attention state that a step of the ring passes to the next, and the inputs that all steps of a backward share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
    """The attention state over the keys seen so far: out [b s h e], lse [b s h] and rest [b s h].

    ``rest``, None for 16-bit inputs, is the rounding error of lse: the denominator is ``exp(lse + rest)``. At scores of 1e4 the
    rounding of a float32 lse changes the denominator by up to 5e-4 of its value.
    """

    out: jax.Array
    lse: jax.Array
    rest: jax.Array | None = None

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (self.out, self.lse) if self.rest is None else (self.out, self.lse, self.rest)

    def nan_at(self, wrong: jax.Array | None) -> State:
        """Set ``out`` to NaN at the queries of ``wrong``, bool [b s]: no error can tell of traced values. None: at no query."""
        return self if wrong is None else self._replace(out=jnp.where(wrong[..., None, None], jnp.nan, self.out))


Gradients = jax.Array | tuple[jax.Array, ...]
"""The gradients of keys: dkv packed like k and v, or (dk, dv) if k and v are two arrays."""
Arrived = Callable[[], jax.Array | None]
"""Returns the gradients of a step's keys that other ranks' queries have given, or None."""


class BackwardInputs(NamedTuple):
    """The inputs that all steps of a backward share: q [b s h d], dout [b s h e], lse and delta [b s h]. Kernels take lse, in
    base 2, and delta as [b h s]. ``sinks`` [h]: these queries' part of the sinks' gradient. ``bounds``: as in the core's
    backward_sums.py."""

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    sinks: jax.Array | None = None
    bounds: jax.Array | None = None


def carries_rest(dtype: jnp.dtype) -> bool:
    """Return True if ``dtype`` is float32 or float64: the state of such inputs carries the rounding error ``State.rest``."""
    return dtype in (jnp.float32, jnp.float64)


def rest_of(top: jax.Array, log_sum: jax.Array, lse: jax.Array) -> jax.Array:
    """Return ``top + log_sum - lse`` (row max, log of row sum, lse), the rounding error of lse; 0 if lse is -inf."""
    return jnp.where(lse == -jnp.inf, 0, (top - lse) + log_sum)
