"""The tensors that are carried from one step of the ring to the next."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """The result over the keys seen so far: out [b s h e], lse [b s h] and its ``rest`` [b s h].

    The rest is what the rounding of lse lost: the softmax's denominator is ``exp(lse + rest)``. At scores of 1e4 the rounding of
    a float32 lse alone changes it by 5e-4. Hence float32 and float64 inputs have a rest; it is None for 16-bit inputs, whose
    scores are less precise than that.
    """

    out: Tensor
    lse: Tensor
    rest: Tensor | None = None

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """Return (out, lse), or (out, lse, rest) if there is a rest."""
        return (self.out, self.lse) if self.rest is None else (self.out, self.lse, self.rest)


Gradients = Tensor | tuple[Tensor, ...]
"""The gradients of keys: dkv packed like k and v, or (dk, dv) if k and v are two arrays."""


class BackwardInputs(NamedTuple):
    """The inputs of the backward that all steps share: q [b s h d], dout [b s h e], lse and delta.

    ``lse``, ``delta``: [b s h]; for kernels [b h s] with lse in base 2. ``sinks`` [h]: the gradient of the sinks from these
    queries. ``bounds``: for kernels, the bounds of the extents of each query tile. ``out`` [b s h e]: for the vendors' backends.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    sinks: Tensor | None = None
    bounds: Tensor | None = None
    out: Tensor | None = None


def carries_rest(dtype: torch.dtype) -> bool:
    """Return whether the state of inputs of ``dtype`` has a rest: that of float32 and float64 does."""
    return dtype in (torch.float32, torch.float64)


def rest_of(top: Tensor, log_sum: Tensor, lse: Tensor) -> Tensor:
    """Return ``top + log_sum - lse``, which the rounding of ``lse = top + log_sum`` lost; 0 for a fully masked query."""
    return (top - lse).add_(log_sum).masked_fill_(lse == -math.inf, 0)
