"""The state spaces of Mamba-2 and Mamba-1 on shards, whose formulas the core's problem/recurrence.py has.

A run's effect on the state is a decay in closed form. Mamba-2 adds the effect of the carried state to the result from the state
0. In Mamba-1 this costs as much as a scan, so it scans a second time, from the carried state.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.problem.recurrence import check_state_space

from ..axes import vary_alike
from ..ring.carry import EXACT, fold_runs
from ..ring.halo import wide
from .delta_rule import _exp, matmul
from .runs import Layout, RunShard, Where

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

CHUNK = 64
"""Tokens that are computed together, and whose intermediate results are recomputed in the backward."""


def state_space(
    x: Float[Array, "batch seq_local ..."],
    dt: Float[Array, "batch seq_local heads"],
    A: Float[Array, " heads"] | Float[Array, "heads N"],
    B: Float[Array, "batch seq_local ... N"],
    C: Float[Array, "batch seq_local ... N"],
    *,
    D: Float[Array, " heads"] | None = None,
    backend: str = "auto",
    axis_name: str = "seq",
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Array, "rows seq_local 2"] | None = None,
) -> Float[Array, "batch seq_local ..."]:
    """Compute the state space of Mamba-2 or Mamba-1 over a ring, each document from the state 0, forward and backward.

    Arguments (arrays but A and D are this rank's shards, inside ``jax.shard_map`` over ``axis_name``):
        A: ``[heads]``, at most 0, for Mamba-2; ``[channels, N]`` for Mamba-1.
        x: ``[batch, s, heads, P]`` for Mamba-2; ``[batch, s, channels]`` for Mamba-1.
        dt: the step sizes after softplus, ``[batch, s, heads]`` or ``[batch, s, channels]``.
        B, C: ``[batch, s, groups, N]``, ``groups`` dividing ``heads``, or ``[batch, s, N]``.
        D: ``[heads]`` or ``[channels]``: adds ``D x``.
        backend: "auto" or "blockwise", plain jnp in at least float32.
        axis_name, layout, length, extents: as in :func:`halo`. Padding gives 0.

    Returns x's shape and dtype. Each rank sends a state for each head and run, whatever the length. Raise ValueError as
    :func:`halo` does, and if shapes do not fit.
    """
    arrays = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    return scan(arrays, Where(axis_name, layout, length, extents), backend)[0]


def scan(arrays: dict[str, Any], where: Where, backend: str = "auto") -> tuple[jax.Array, jax.Array | None]:
    """Compute ``state_space`` from ``where.initial`` on. Return also Mamba-2's last state, if wanted."""
    x, dt, A, B, C, D = arrays.values()
    check = lambda _: check_state_space({name: None if y is None else y.shape for name, y in arrays.items()}, backend)
    shard = RunShard.of("state_space", x, where, check)
    u, step, A, B, C = vary_alike((where.axis_name,), *map(wide, (x, dt, A, B, C)))
    u, step, B, C = shard.zero_padding(u, step, B, C)
    runs = [shard.to_runs(each) for each in (u, step, B, C)]
    shape = runs[0].shape[:2]
    arrays_of = [y.reshape(-1, *y.shape[2:]) for y in (*runs, shard.documents(x.shape[0]))]
    out, last = (
        (_selective(shard, shape, arrays_of, A), None) if A.ndim == 2 else _run_structured(shard, shape, arrays_of, A, where)
    )
    out = shard.join(out.reshape(*shape, *out.shape[1:]))
    if D is not None:
        out = out + wide(D).reshape(-1, *[1] * (x.ndim - 3)) * u
    return out.astype(x.dtype), last


def _run_structured(
    shard: RunShard, shape: Any, runs: list[jax.Array], A: jax.Array, where: Where
) -> tuple[jax.Array, jax.Array | None]:
    x, dt, B, C, documents = runs
    B, C = (jnp.repeat(each, x.shape[2] // each.shape[2], 2) for each in (B, C))
    state = 0 * x[:, 0, :, :, None] * B[:, 0, :, None]
    state, out = _over_chunks(_run_structured_chunk, state, documents, x * dt[..., None], dt * A, B, C)
    if not (shard.order.slots or where.last):
        return out, None
    c = jnp.cumsum(dt * A, 1)
    effect = C * _exp(c, (documents == documents[:, :1])[..., None])[..., None]
    apart = lambda y: y.reshape(*shape, *y.shape[1:])
    decay = apart(jnp.exp(c[:, -1])[..., None, None])
    states, last = shard.states(decay, apart(state), where, False)
    return out + jnp.einsum("rthn,rhpn->rthp", effect, states.reshape(state.shape), precision=EXACT), last


def _run_structured_chunk(carried: Any, inputs: Any) -> Any:
    state, prior = carried
    x, log_decay, B, C = (jnp.swapaxes(each, 1, 2) for each in inputs[:4])  # [runs, heads, tokens, ...]
    c, own = jnp.cumsum(log_decay, -1), inputs[4][:, None]
    same = (own[..., :, None] == own[..., None, :]) & jnp.tril(jnp.ones((own.shape[-1],) * 2, bool))
    out = matmul(matmul(C, jnp.swapaxes(B, -1, -2)) * _exp(c[..., :, None] - c[..., None, :], same), x)
    out = out + matmul(C * _exp(c, own == prior[..., None])[..., None], jnp.swapaxes(state, -1, -2))
    kept = _exp(c[..., -1:], own[..., -1:] == prior[..., None])[..., None]
    writes = x * _exp(c[..., -1:] - c, own == own[..., -1:])[..., None]
    return (state * kept + matmul(jnp.swapaxes(writes, -1, -2), B), inputs[4][:, -1:]), jnp.swapaxes(out, 1, 2)


def _selective(shard: RunShard, shape: Any, runs: list[jax.Array], A: jax.Array) -> jax.Array:
    x, dt, B, C, documents = runs
    apart = lambda y: y.reshape(*shape, 1, *y.shape[1:])
    zeros = 0 * x[:, 0, :, None] * A
    scan = lambda state: _over_chunks(partial(_scan_chunk, A=A), state, documents, x, dt, B, C)
    if not shard.order.slots:
        return scan(zeros)[1]
    decay = jnp.exp(dt.sum(1)[..., None] * A)
    states = fold_runs(shard.forget(apart(decay)), apart(scan(zeros)[0]), shard.order, shard.axis_name, False)
    return scan(shard.begin_fresh(states).reshape(zeros.shape))[1]


def _scan_chunk(carried: Any, inputs: Any, A: Any) -> Any:
    """Compose the maps of a chunk's tokens by doubling: after step i each map is that of the last 2^i tokens."""
    (state, prior), (x, dt, B, C, documents) = carried, inputs
    new = documents != jnp.concatenate([prior, documents[:, :-1]], 1)
    a = jnp.where(new[..., None, None], 0, jnp.exp(dt[..., None] * A))
    b = (dt * x)[..., None] * B[:, :, None]
    span = 1
    while span < x.shape[1]:
        before = lambda y, value, span=span: jnp.pad(y[:, :-span], [(0, 0), (span, 0), (0, 0), (0, 0)], constant_values=value)
        a, b = a * before(a, 1), a * before(b, 0) + b
        span *= 2
    states = a * state[:, None] + b
    return (states[:, -1], documents[:, -1:]), jnp.einsum("rtdn,rtn->rtd", states, C, precision=EXACT)


def _over_chunks(step: Any, state: jax.Array, documents: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scan ``step`` over chunks of tokens [runs, n, ...], recomputed in the backward. Return the last state and the outputs."""
    n = documents.shape[1]
    chunk = min(CHUNK, n)
    pad = lambda x, **mode: jnp.pad(x, [(0, 0), (0, -n % chunk), *[(0, 0)] * (x.ndim - 2)], **mode)
    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
    inputs = (*(cut(pad(x)) for x in arrays), cut(pad(documents, mode="edge")))
    (state, _), out = lax.scan(jax.checkpoint(step), (state, documents[:, :1]), inputs)
    return state, jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :n]
