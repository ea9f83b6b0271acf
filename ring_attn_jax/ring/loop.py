"""The ring: keys and values go round, every rank merges what it may see, gradients are sent home.

The same text as the other package's loop.py, up to the name of the ring and of an array.
"""

from __future__ import annotations

import jax

from ring_attn_core.plan.ring import RingPlan

from ..attend.backend import attend, attend_backward, cotangents, sink_gradient
from ..attend.keys import Keys
from ..attend.score import Score
from ..attend.state import Gradients
from .strategies.ring import circulate, rows


def forward(q: jax.Array, keys: Keys, plan: RingPlan, axis: str, score: Score) -> tuple[jax.Array, jax.Array]:
    """Shards q [b s h d], keys [b t g d+e] of this rank -> out [b s h e] in q's dtype, lse [b s h] in float32."""
    total = None
    for step in circulate(keys, plan, axis):
        total = step.settle(attend(q, step.keys, step.rows, score, total, last=step.last))
    assert total is not None
    return total


def backward(
    q: jax.Array,
    keys: Keys,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
    plan: RingPlan,
    axis: str,
    score: Score,
) -> tuple[jax.Array, Gradients, jax.Array | None]:
    """Cotangents dout [b s h e], dlse [b s h] -> dq [b s h d], dkv [b t g d+e] or (dk, dv) of this rank's own shards.

    In float32, or q's dtype where no other rank adds to them. And the part of the gradient of the sinks [h] that this rank's
    queries make, None without sinks.
    """
    of_q = cotangents(q, keys, rows(plan, axis, 0), score, out, lse, dout, dlse)
    dq = None
    for step in circulate(keys, plan, axis):
        dq, dkv = step.settle(attend_backward(of_q, step.keys, step.rows, score, dq, step.arrived, last=step.last))
        step.send_home(dkv)
    assert dq is not None
    return dq, step.home(), sink_gradient(score, lse, of_q)
