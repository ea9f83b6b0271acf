"""The states of recurrent layers in a cache, all on every rank. The ring computes a chunk of prompts, each rank new tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.model.recurrence_steps import ARRAYS, EARLIER, STEPS

from ..recurrence.convolution import convolve
from ..recurrence.delta_rule import delta_rule
from ..recurrence.runs import Where
from ..recurrence.state_space import scan
from ..ring.halo import wide
from .step import DecodeStep

States = tuple[jax.Array, jax.Array]
"""One layer's last tokens before its convolution [batch, taps - 1, channels], and its state [batch, heads, ...]."""


def mix_chunk(mixer: Any, name: str, states: States, axis_name: str, step: DecodeStep, x: jax.Array) -> tuple[jax.Array, States]:
    """Return the output of a recurrent layer for this rank's shard x of a chunk of prompts, and the states after the chunk."""
    conv, state = states
    ends = jnp.where(step.positions >= 0, 0, EARLIER)
    extents = jnp.stack([jnp.full_like(ends, EARLIER), ends], -1)
    after: list[jax.Array] = []

    def where(before: jax.Array) -> Where:
        layout = "contiguous" if lax.axis_size(axis_name) == 1 else step.layout or ""  # one rank has one run
        return Where(axis_name, layout, max(1, step.length), extents, True, None if step.fresh else before)

    def convolved(y: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        own = jnp.where(step.positions >= 0, step.positions - step.before[:, None], -1)
        last = lax.psum(last_tokens(y, own, step.chunk, conv.shape[1]).astype(conv.dtype), axis_name)
        after.append(move_on(conv, last, step.chunk))
        return convolve(y, weight, bias, "silu", where(conv.astype(y.dtype)))

    def recur(*arrays: jax.Array) -> jax.Array:
        named = dict(zip(ARRAYS[name], arrays, strict=True))
        out, last = scan(named, where(state)) if name == "mamba2" else delta_rule(named, where(state), normalize=True)
        assert last is not None
        after.append(last)
        return out

    return mixer.mix(x, convolved, recur), (after[0], after[1])


def mix_tokens(mixer: Any, name: str, states: States, valid: jax.Array | None, x: jax.Array) -> tuple[jax.Array, States]:
    """Return the output of a recurrent layer for new tokens x [b s dim], and the states after those that are ``valid``."""
    conv, state = states
    kept = lambda t, new, old: new if valid is None else jnp.where(valid[:, t].reshape(-1, *[1] * (new.ndim - 1)), new, old)

    def convolved(y: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        nonlocal conv
        outs = []
        for t in range(y.shape[1]):
            seen = jnp.concatenate([conv.astype(y.dtype), y[:, t : t + 1]], 1)
            outs.append((seen * weight.T).sum(1))
            conv = kept(t, seen[:, 1:].astype(conv.dtype), conv)
        out = jnp.stack(outs, 1)
        return jax.nn.silu(out if bias is None else out + bias)

    def recur(*arrays: jax.Array) -> jax.Array:
        nonlocal state
        outs = []
        for t in range(x.shape[1]):
            new = [each[:, t] if each.ndim > 1 else each for each in map(wide, arrays)]
            out, after = STEPS[name](new, state, jnp.exp)
            state = kept(t, after, state)
            outs.append(out)
        return jnp.stack(outs, 1).astype(arrays[0].dtype)

    return mixer.mix(x, convolved, recur), (conv, state)


def last_tokens(hidden: jax.Array, positions: jax.Array, lengths: jax.Array, keep: int) -> jax.Array:
    """Return each row's last ``keep`` tokens [batch, keep, dim] from this rank's ``hidden``, 0 for those on other ranks."""
    wanted = lengths[:, None] - keep + jnp.arange(keep)
    here = (positions[..., None] == wanted[:, None]) & (positions >= 0)[..., None]
    return jnp.where(here.any(1)[..., None], jnp.take_along_axis(hidden, here.argmax(1)[..., None], 1), 0)


def move_on(before: jax.Array, last: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the last tokens [batch, keep, dim] after ``lengths`` new ones, whose last are ``last``, 0 before the first."""
    keep = before.shape[1]
    place = (lengths[:, None] + jnp.arange(keep))[..., None]
    return jnp.where(place < keep, jnp.take_along_axis(before, jnp.minimum(place, keep - 1), 1), last) if keep else last
