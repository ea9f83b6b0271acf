"""The ring: keys and values go round, every rank merges what it may see, gradients are sent home.

The same text as the other package's loop.py, up to the name of the ring and of an array.
"""

from __future__ import annotations

from torch import Tensor

from ..attend.backend import Backend
from ..attend.keys import Keys
from ..attend.score import Score
from ..attend.state import Gradients, State
from .step import Ring
from .strategies import STRATEGIES


def forward(q: Tensor, keys: Keys, score: Score, ring: Ring, backend: Backend, total: State | None = None) -> State:
    """Shards q [b s h d], keys [b t g d+e] of this rank -> out [b s h e] in q's dtype, lse [b s h] in float32.

    Continued from ``total``, in float32, where the queries have seen other keys, and the sinks, already.
    """
    for step in STRATEGIES[ring.strategy](keys, ring):
        total = step.settle(backend.attend(q, step.keys, step.rows, score, total, last=step.last))
    assert total is not None
    return total


def backward(
    q: Tensor, keys: Keys, total: State, dtotal: State, score: Score, ring: Ring, backend: Backend
) -> tuple[Tensor, Gradients, Tensor | None]:
    """Cotangents dout [b s h e], dlse [b s h] -> dq [b s h d], dkv [b t g d+e] or (dk, dv) of this rank's own shards.

    ``total`` is the (out, lse) of the forward pass and ``dtotal`` their cotangents. Gradients are float32, or q's dtype where no
    other rank adds to them. And the part of the gradient of the sinks [h] that this rank's queries make, None without sinks.
    """
    of_q = dq = None
    for step in STRATEGIES[ring.strategy](keys, ring):
        of_q = backend.cotangents(q, keys, step.rows, score, total, dtotal) if of_q is None else of_q
        dq, dkv = step.settle(backend.attend_backward(of_q, step.keys, step.rows, score, dq, step.arrived, last=step.last))
        step.send_home(dkv)
    assert of_q is not None and dq is not None
    return dq, step.home(), of_q.sinks
