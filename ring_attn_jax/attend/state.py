"""What is carried from step to step."""

from __future__ import annotations

from typing import NamedTuple

import jax

State = tuple[jax.Array, jax.Array]
"""(out [b s h e], lse [b s h]) over the keys seen so far."""


Gradients = jax.Array | tuple[jax.Array, ...]
"""Of keys: dkv packed like k and v, or dk and dv where they are apart."""


class Cotangents(NamedTuple):
    """What every step of the backward needs of the queries: q [b s h d], dout [b s h e], and of their sums what the backend uses.

    ``lse``, ``delta``: [b s h]; for kernels [b h s], lse in base 2. ``sinks`` [h]: the gradient of the sinks from these queries.
    ``bounds``: of the extents of a kernel's query tiles.
    """

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    sinks: jax.Array | None = None
    bounds: jax.Array | None = None
