"""The arrays that are carried from step to step."""

from __future__ import annotations

from typing import NamedTuple

import jax

State = tuple[jax.Array, jax.Array]
"""``(out [b s h e], lse [b s h])`` over the keys seen so far."""


Gradients = jax.Array | tuple[jax.Array, ...]
"""Gradients of keys: dkv, packed like k and v, or (dk, dv) if they are unpacked."""


class BackwardInputs(NamedTuple):
    """The backward inputs of the queries: q [b s h d], dout [b s h e], and the row sums that the backend uses.

    ``lse``, ``delta``: [b s h]; for kernels [b h s], lse in base 2. ``sinks`` [h]: the gradient of the sinks from these queries.
    ``bounds``: the bounds of the extents in each query tile of a kernel.
    """

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    sinks: jax.Array | None = None
    bounds: jax.Array | None = None
