"""The attention state that a step of the ring passes to the next, and the inputs that all steps of a backward share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """The attention state over the keys seen so far: out [b s h e], lse [b s h] and rest [b s h].

    ``rest`` is the rounding error of lse: the softmax's denominator is ``exp(lse + rest)``. At scores of 1e4 the rounding of a
    float32 lse changes it by up to 5e-4 of its value. ``rest`` is None for 16-bit inputs: their scores have larger errors.
    """

    out: Tensor
    lse: Tensor
    rest: Tensor | None = None

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (self.out, self.lse) if self.rest is None else (self.out, self.lse, self.rest)


Gradients = Tensor | tuple[Tensor, ...]
"""The gradients of keys: dkv packed like k and v, or (dk, dv) if k and v are two arrays."""
Arrived = Callable[[], Tensor | None]
"""Returns the gradients of a step's keys that other ranks' queries have given, or None."""


class BackwardInputs(NamedTuple):
    """The inputs that all steps of a backward share: q [b s h d], dout [b s h e], lse and delta [b s h].
    Kernels take lse, in base 2, and delta as [b h s]. ``sinks`` [h]: these queries' part of the sinks' gradient. ``bounds`` int32
    [b, q tiles, 4]: as in the core's backward_sums.py. ``out`` [b s h e]: the forward's output, for the vendors' backends."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    sinks: Tensor | None = None
    bounds: Tensor | None = None
    out: Tensor | None = None


def carries_rest(dtype: torch.dtype) -> bool:
    """Return True if ``dtype`` is float32 or float64: the state of such inputs carries the rounding error ``State.rest``."""
    return dtype in (torch.float32, torch.float64)


def rest_of(top: Tensor, log_sum: Tensor, lse: Tensor) -> Tensor:
    """Return ``top + log_sum - lse`` (row max, log of row sum, lse), the rounding error of lse; 0 if lse is -inf."""
    return (top - lse).add_(log_sum).masked_fill_(lse == -math.inf, 0)
