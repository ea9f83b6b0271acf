"""The arrays that are carried from one step of the ring to the next."""

from __future__ import annotations

from typing import NamedTuple

import jax

State = tuple[jax.Array, jax.Array]
"""The pair (out [b s h e], lse [b s h]) over the keys seen so far."""


Gradients = jax.Array | tuple[jax.Array, ...]
"""The gradients of keys: dkv packed like k and v, or (dk, dv) if k and v are two arrays."""


class BackwardInputs(NamedTuple):
    """The inputs of the backward that all steps share: q [b s h d], dout [b s h e], lse and delta.

    ``lse``, ``delta``: [b s h]; for kernels [b h s], lse in base 2. ``sinks`` [h]: the gradient of the sinks from these queries.
    ``bounds``: for kernels, the bounds of the extents of each query tile.
    """

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    sinks: jax.Array | None = None
    bounds: jax.Array | None = None
