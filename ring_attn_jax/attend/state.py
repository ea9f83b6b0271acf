"""The arrays that one step of the ring passes to the next."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
    """The attention state over the keys seen so far: out [b s h e], lse [b s h] and rest [b s h].

    The rest is the rounding error of lse: the softmax's denominator is ``exp(lse + rest)``. At scores of 1e4 the rounding of a
    float32 lse changes the denominator by up to a relative 5e-4. The rest is None for 16-bit inputs, whose scores have larger
    errors.
    """

    out: jax.Array
    lse: jax.Array
    rest: jax.Array | None = None

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Return (out, lse), or (out, lse, rest) if rest is not None."""
        return (self.out, self.lse) if self.rest is None else (self.out, self.lse, self.rest)


Gradients = jax.Array | tuple[jax.Array, ...]
"""The gradients of keys: dkv packed like k and v, or (dk, dv) if k and v are two arrays."""


class BackwardInputs(NamedTuple):
    """The inputs that all steps of a backward share: q [b s h d], dout [b s h e], lse and delta.

    ``lse``, ``delta``: [b s h]; for kernels [b h s] with lse in base 2. ``sinks`` [h]: the sinks' gradient from these queries;
    the steps do not change it. ``bounds`` int32 [b, q tiles, 4], for kernels: of the extents (``first``, ``end``) in each query
    tile the least ``first``, greatest ``end``, greatest ``first`` and least ``end``.
    """

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    sinks: jax.Array | None = None
    bounds: jax.Array | None = None


def carries_rest(dtype: jnp.dtype) -> bool:
    """Return True if the attention state of inputs of ``dtype`` has a ``rest``: for float32 and float64."""
    return dtype in (jnp.float32, jnp.float64)


def rest_of(top: jax.Array, log_sum: jax.Array, lse: jax.Array) -> jax.Array:
    """Return ``top + log_sum - lse``, the rounding error of ``lse = top + log_sum``; 0 for a fully masked query."""
    return jnp.where(lse == -jnp.inf, 0, (top - lse) + log_sum)
