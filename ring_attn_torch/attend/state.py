"""The attention state that a step of the ring passes to the next, and the inputs that all steps of a backward share."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """The attention state over the keys seen so far: out [b s h e], lse [b s h] and rest [b s h].

    The rest is the rounding error of lse: the softmax's denominator is ``exp(lse + rest)``. At scores of 1e4 the rounding of a
    float32 lse changes the denominator by up to a relative 5e-4. The rest is None for 16-bit inputs, whose scores have larger
    errors.
    """

    out: Tensor
    lse: Tensor
    rest: Tensor | None = None

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """Return (out, lse), or (out, lse, rest) if rest is not None."""
        return (self.out, self.lse) if self.rest is None else (self.out, self.lse, self.rest)


Gradients = Tensor | tuple[Tensor, ...]
"""The gradients of keys: dkv packed like k and v, or (dk, dv) if k and v are two arrays."""


class BackwardInputs(NamedTuple):
    """The inputs that all steps of a backward share: q [b s h d], dout [b s h e], lse and delta.

    ``lse``, ``delta``: [b s h]; for kernels [b h s] with lse in base 2. ``sinks`` [h]: the sinks' gradient from these queries;
    the steps do not change it. ``bounds`` int32 [b, q tiles, 4], for kernels: of the extents (``first``, ``end``) in each query
    tile the least ``first``, greatest ``end``, greatest ``first`` and least ``end``. ``out`` [b s h e]: the output of the
    forward, for the vendors' backends.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    sinks: Tensor | None = None
    bounds: Tensor | None = None
    out: Tensor | None = None


def carries_rest(dtype: torch.dtype) -> bool:
    """Return True if the state of inputs of ``dtype`` has a ``rest``, the rounding error of lse: for float32 and float64."""
    return dtype in (torch.float32, torch.float64)


def rest_of(top: Tensor, log_sum: Tensor, lse: Tensor) -> Tensor:
    """Return ``top + log_sum - lse``, the rounding error of ``lse = top + log_sum``; 0 for a fully masked query."""
    return (top - lse).add_(log_sum).masked_fill_(lse == -math.inf, 0)
