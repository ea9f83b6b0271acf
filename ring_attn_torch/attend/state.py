"""What is carried from step to step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

State = tuple[Tensor, Tensor]
"""(out [b s h e], lse [b s h]) over the keys seen so far."""


Gradients = Tensor | tuple[Tensor, ...]
"""Of keys: dkv packed like k and v, or dk and dv where they are apart."""


class Cotangents(NamedTuple):
    """What every step of the backward needs of the queries: q [b s h d], dout [b s h e], and of their sums what the backend uses.

    ``lse``, ``delta``: [b s h]; for kernels [b h s], lse in base 2. ``sinks`` [h]: the gradient of the sinks from these queries.
    ``bounds``: of the extents of a kernel's query tiles.
    ``out`` [b s h e]: for a vendor's backend.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    sinks: Tensor | None = None
    bounds: Tensor | None = None
    out: Tensor | None = None
