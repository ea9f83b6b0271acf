"""One more token of each recurrent layer's rule, from the state that a cache keeps, for arrays of any framework.

Arrays are those of the rules without their axis of tokens, [batch, heads, ...], in float32 or float64; A and D are [heads]. A
head of q and k, or of B and C, is shared by neighbouring heads. ``exp``: the framework's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Array = Any

ARRAYS = {"gated_delta_net": ("q", "k", "v", "g", "beta"), "mamba2": ("x", "dt", "A", "B", "C", "D")}
"""The arrays of each mixer's rule, in the order of its arguments."""

EARLIER = -(1 << 30)
"""The first position of the document that a cache holds: before every token of a chunk."""


def delta_rule_step(arrays: Sequence[Array], state: Array, exp: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Return the result of ``gated_delta_rule(..., normalize=True)`` for one token, and the state after it."""
    q, k, v, g, beta = arrays
    unit = lambda x: x * ((x * x).sum(-1)[..., None] + 1e-6) ** -0.5
    q, k = (unit(x)[:, :, None, :, None] for x in (q, k))
    v, decay, beta, state = (_group(x, q.shape[1]) for x in (v, exp(g), beta, state))
    state = state * decay[..., None, None]
    written = (v - (k * state).sum(-2)) * beta[..., None]
    state = state + k * written[..., None, :]
    return _heads((q * state).sum(-2) * q.shape[3] ** -0.5), _heads(state)


def state_space_step(arrays: Sequence[Array], state: Array, exp: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Return the result of ``state_space`` of Mamba-2 for one token, and the state after it."""
    x, dt, A, B, C, D = arrays
    B, C = (each[:, :, None, None] for each in (B, C))
    written, decay, state = (_group(each, B.shape[1]) for each in (x * dt[..., None], exp(dt * A), state))
    state = state * decay[..., None, None] + written[..., None] * B
    return _heads((state * C).sum(-1)) + D[:, None] * x, _heads(state)


STEPS = {"gated_delta_net": delta_rule_step, "mamba2": state_space_step}


def _group(x: Array, groups: int) -> Array:
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _heads(x: Array) -> Array:
    return x.reshape(x.shape[0], -1, *x.shape[3:])
