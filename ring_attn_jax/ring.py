"""The ring: keys and values go round, every rank merges what it may see, gradients are sent home.

The same text as the other package's ring.py, up to the name of the ring and of an array.
"""

from __future__ import annotations

import jax

from ring_attn_core.plan import RingPlan

from .attend import Score, attend, attend_backward, nothing, row_delta, seen_only, zero_gradient
from .comm import circulate


def forward(q: jax.Array, kv: jax.Array, plan: RingPlan, axis: str, score: Score) -> tuple[jax.Array, jax.Array]:
    """Shards q [b s h d], kv [b t g d+e] of this rank -> out [b s h e] in q's dtype, lse [b s h] in float32."""
    total = nothing(q, kv)
    for step in circulate(kv, plan, axis):
        total = step.settle(attend(q, step.kv, step.rows, score, total, last=step.last))
    return total


def backward(
    q: jax.Array,
    kv: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
    plan: RingPlan,
    axis: str,
    score: Score,
) -> tuple[jax.Array, jax.Array]:
    """Cotangents dout [b s h e], dlse [b s h] -> dq [b s h d], dkv [b t g d+e] of this rank's own shards, in float32."""
    dout, dlse = seen_only(dout, dlse, lse)
    delta = row_delta(out, dout, dlse)
    dq = zero_gradient(q)
    for step in circulate(kv, plan, axis):
        dq, dkv = step.settle(attend_backward(q, step.kv, step.rows, score, lse, delta, dout, dq))
        step.send_home(dkv)
    return dq, step.home()
