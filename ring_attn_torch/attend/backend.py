"""The interface of a backend: the three functions that the ring loop (``ring/loop.py``) calls.

``compile_call`` of ``call/decide.py`` selects the backend of a call.
"""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .keys import Keys
from .score import Score
from .state import Arrived, BackwardInputs, Gradients, State
from .tiles import Rows


class Backend(Protocol):
    """An implementation of attention over the keys of one shard."""

    two_arrays: ClassVar[bool]
    """True if k and v may stay two arrays when no keys travel between ranks."""

    def attend(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State | None, last: bool) -> State:
        """Merge attention to the visible keys into ``total`` (None before the first step), and return the new state.
        It is float32 (float64 for float64 inputs); after the ``last`` step ``out`` is in q's dtype."""
        ...

    def backward_inputs(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State, dtotal: State) -> BackwardInputs:
        """Compute delta = rowsum(dout * out) - dlse, and return the inputs that all steps share. ``dtotal``: (dout, dlse).

        Steps compute ``exp(s - lse)``: so dout and delta are scaled by ``exp(-rest)`` here. For a query that sees no key, dout
        and delta may hold NaN, which must not reach the gradients of keys and sinks, even if sinks make its lse finite.
        """
        ...

    def attend_backward(
        self, query: BackwardInputs, keys: Keys, rows: Rows, score: Score, dq: Tensor | None, arrived: Arrived, last: bool
    ) -> tuple[Tensor, Gradients]:
        """Add the contribution of ``keys`` to ``dq`` (None before the first step), and dk and dv to what ``arrived()`` returns.
        These are their gradients from other ranks' queries, or None. Until complete, all are float32 (float64 if inputs are)."""
        ...


def sink_gradient(score: Score, total: State, delta: Tensor) -> Tensor | None:
    if score.sinks is None:
        return None
    log_p = score.sinks.to(total.lse.dtype) - total.lse
    p = torch.where(total.lse == -math.inf, 0, torch.exp(log_p if total.rest is None else log_p - total.rest))
    return -torch.sum(p * delta, (0, 1))
