"""The interface of a backend: the three functions that the ring loop (``ring/loop.py``) calls.

``checked`` of ``call/prepare.py`` selects the backend of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .keys import Keys
from .score import Score
from .state import BackwardInputs, Gradients, State
from .tiles import Rows


class Backend(Protocol):
    """An implementation of attention over the keys of one shard."""

    two_arrays: ClassVar[bool]
    """True if k and v may stay two arrays when no keys travel between ranks."""

    def attend(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State | None, last: bool) -> State:
        """Merge attention to the visible keys into ``total``, the state over the keys seen so far, and return the new state.

        A run is an arithmetic progression of token positions. ``rows[q_run][k_run]``: a ``runs.Row`` for each pair of a query run
        and a key run. ``total`` is None before the first step. The state is float32 (float64 for float64 inputs). After the
        ``last`` step ``out`` is cast to q's dtype. The state has a ``rest``, the rounding error of lse, if
        ``carries_rest(q.dtype)``.
        """
        ...

    def backward_inputs(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State, dtotal: State) -> BackwardInputs:
        """Compute delta = rowsum(dout * out) - dlse, and return the inputs that all steps of a backward share.

        ``total``: the state after the forward. ``dtotal``: (dout, dlse). The loop calls this once per backward. ``total.rest`` is
        the rounding error of lse, so a probability is ``exp(s - lse - rest)``. In every gradient a probability is multiplied by
        dout or delta. The steps compute only ``exp(s - lse)``, so this function scales dout and delta by ``exp(-rest)``.

        For a query that sees no key, dout and delta may hold NaN. The NaN must not reach the gradients of keys and sinks. If the
        query's lse is -inf, this function or the kernels set its dout and delta to 0. With sinks, such a query can have a finite
        lse; its out is 0. Then this function keeps its dout out of the sinks' gradient, and this function or the steps keep its
        dout and delta out of the keys' gradients.
        """
        ...

    def attend_backward(
        self,
        of_q: BackwardInputs,
        keys: Keys,
        rows: Rows,
        score: Score,
        dq: Tensor | None,
        arrived: Callable[[], Tensor | None],
        last: bool,
    ) -> tuple[Tensor, Gradients]:
        """Add the contribution of ``keys`` to ``dq``, and add dk and dv to the gradients that ``arrived()`` returns.

        ``arrived()`` returns the gradients of ``keys`` from other ranks' queries, or None. ``dq`` is None before the first step.
        Return dq and the gradients of ``keys``. A gradient is float32 (float64 for float64 inputs) while later steps or other
        ranks still add to it. A complete gradient may be in q's dtype.
        """
        ...


def sink_gradient(score: Score, total: State, delta: Tensor) -> Tensor | None:
    """Return the gradient of the sinks [h], or None without sinks.

    The gradient is ``-sum_bs exp(sink - lse - rest) delta`` over arrays [b s h], where rest is the rounding error of lse
    (``State``). The formula treats a sink as a key whose value is 0.
    """
    if score.sinks is None:
        return None
    log_p = score.sinks.to(total.lse.dtype) - total.lse
    p = torch.where(total.lse == -math.inf, 0, torch.exp(log_p if total.rest is None else log_p - total.rest))
    return -torch.sum(p * delta, (0, 1))
