"""The gated delta rule of Qwen3-Next and the delta attention of Kimi, on shards (formulas in the core's problem/recurrence.py).

A run is computed once, from the state 0, together with the effect of a state, if any run needs one: K columns of 0 are appended
to the values, and start from the state I. The result is ``out + effect @ state`` with the state that earlier runs leave. Inside a
chunk of tokens the rule is a triangular system (the WY form); segments of chunks are recomputed in the backward.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.problem.recurrence import check_delta_rule

from ..axes import vary_alike
from ..ring.carry import EXACT
from ..ring.halo import wide
from .runs import Layout, RunShard, Where

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

CHUNK = {3: 64, 4: 16}
"""Tokens of a chunk, by the number of dims of g: with a decay for each channel a pair of tokens has K decays."""
SEGMENT = 16
"""Chunks that are recomputed together."""

matmul = partial(jnp.matmul, precision=EXACT)


def gated_delta_rule(
    q: Float[Array, "batch seq_local heads K"],
    k: Float[Array, "batch seq_local heads K"],
    v: Float[Array, "batch seq_local v_heads V"],
    g: Float[Array, "batch seq_local v_heads ..."],
    beta: Float[Array, "batch seq_local v_heads"],
    *,
    scale: float | None = None,
    normalize: bool = False,
    backend: str = "auto",
    axis_name: str = "seq",
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Array, "rows seq_local 2"] | None = None,
) -> Float[Array, "batch seq_local v_heads V"]:
    """Compute the gated delta rule over a ring, each document from the state 0, forward and backward.

    Arguments (arrays are this rank's shards, inside ``jax.shard_map`` over ``axis_name``):
        q, k: ``[batch, s, heads, K]``; v: ``[batch, s, v_heads, V]``, ``heads`` dividing ``v_heads``: v's head h reads q's and
            k's head ``h // (v_heads / heads)``.
        g: the log of the decay, at most 0: ``[batch, s, v_heads]`` (gated delta net), or ``[batch, s, v_heads, K]`` (Kimi).
        beta: ``[batch, s, v_heads]``, how much of a value is written.
        scale: multiplies q; None: ``K ** -0.5``.
        normalize: divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        backend: "auto" or "blockwise", plain jnp in at least float32.
        axis_name, layout, length, extents: as in :func:`halo`. Padding gives 0.

    Returns ``[batch, s, v_heads, V]`` in v's dtype. Each rank sends a state and a matrix K x K for each head and run, whatever
    the length. Raise ValueError as :func:`halo` does, and if shapes do not fit.
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return delta_rule(arrays, Where(axis_name, layout, length, extents), scale, normalize, backend)[0]


def delta_rule(
    arrays: dict[str, jax.Array], where: Where, scale: float | None = None, normalize: bool = False, backend: str = "auto"
) -> tuple[jax.Array, jax.Array | None]:
    """Compute ``gated_delta_rule`` from ``where.initial`` on. Return also the last state [batch, v_heads, K, V], if wanted."""
    q, k, v, g, beta = arrays.values()
    check = lambda _: check_delta_rule({name: x.shape for name, x in arrays.items()}, backend)
    shard = RunShard.of("gated_delta_rule", q, where, check)
    q, k, v32, g, beta = shard.zero_padding(*vary_alike((where.axis_name,), *map(wide, arrays.values())))
    if normalize:
        q, k = (x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (jnp.repeat(x, v.shape[2] // q.shape[2], 2) for x in (q, k))
    runs = [shard.to_runs(x) for x in (q, k, v32, g, beta)]
    shape, effect = runs[0].shape[:2], q.shape[-1] if shard.order.slots or where.initial is not None else 0
    out, ends = _run(effect, *(x.reshape(-1, *x.shape[2:]) for x in (*runs, shard.documents(q.shape[0]))))
    out, ends = out.reshape(*shape, *out.shape[1:]), ends.reshape(*shape, *ends.shape[1:])
    last = None
    if effect or where.last:
        b, a = ends[..., : v.shape[-1]], ends[..., v.shape[-1] :] if effect else None
        states, last = shard.states(a, b, where, True)
    if effect:
        carried = jnp.einsum("brthk,brhkv->brthv", out[..., v.shape[-1] :], states, precision=EXACT)
        out = out[..., : v.shape[-1]] + carried
    return shard.join(out).astype(v.dtype), last


def _run(effect: int, q: Any, k: Any, v: Any, g: Any, beta: Any, documents: Any) -> tuple[jax.Array, jax.Array]:
    """Return runs' [out | effect] [runs, n, heads, V + K] and [bias | transition]; with an ``effect`` of 0 out and bias."""
    (runs, n, heads, size), chunk = k.shape, CHUNK[g.ndim]
    g = g[..., None] if g.ndim == 3 else g
    segment = min(chunk * SEGMENT, -(-n // chunk) * chunk)
    pad = lambda x, **mode: jnp.pad(x, [(0, 0), (0, -n % segment), *[(0, 0)] * (x.ndim - 2)], **mode)
    cut = lambda x: jnp.moveaxis(x.reshape(runs, -1, segment, *x.shape[2:]), 1, 0)
    arrays = [cut(pad(x)) for x in (q, k, jnp.pad(v, [(0, 0)] * 3 + [(0, effect)]), g, beta[..., None])]
    state = jnp.eye(size, v.shape[-1] + effect, k=v.shape[-1], dtype=v.dtype)  # (0 | I)
    state = jnp.broadcast_to(state, (runs, heads, *state.shape)) + 0 * k[:, :1, :, :, None].mean(1)  # varying as k is
    step = jax.checkpoint(partial(_segment, chunk=chunk))
    carried = state, documents[:, :1]
    (state, _), out = lax.scan(step, carried, (*arrays, cut(pad(documents, mode="edge"))))
    return jnp.moveaxis(out, 0, 1).reshape(runs, -1, *out.shape[3:])[:, :n], state


def _segment(carried: Any, inputs: Any, chunk: int) -> Any:
    """Return the state after a segment of chunks and its document, and the outputs."""
    state, prior = carried
    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 3, 1)  # [runs, heads, chunks, chunk, ...]
    q, k, v, g, beta = map(cut, inputs[:5])
    own = inputs[5].reshape(inputs[5].shape[0], 1, -1, chunk)
    prior = jnp.concatenate([prior[:, None], own[:, :, :-1, -1]], 2)
    c = jnp.cumsum(g, -2)
    same = (own[..., :, None] == own[..., None, :]) & jnp.tril(jnp.ones((chunk, chunk), bool))
    from_start = _exp(c, (own == prior[..., None])[..., None])
    to_end = _exp(c[..., -1:, :] - c, (own == own[..., -1:])[..., None])
    kept = jnp.moveaxis(_exp(c[..., -1, :], (own[..., -1] == prior)[..., None]), 2, 0)[..., None]
    system = jnp.eye(chunk, dtype=q.dtype) + jnp.tril(_pairs(k * beta, k, c, same), -1)
    right = jnp.concatenate([v * beta, k * beta * from_start], -1)
    solved = matmul(_inverse(system), right)
    new, old, within = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :], _pairs(q, k, c, same)

    def step(state: Any, chunk: Any) -> Any:
        new, old, reads, within, writes, kept = chunk
        written = new - matmul(old, state)
        return state * kept + matmul(jnp.swapaxes(writes, -1, -2), written), matmul(reads, state) + matmul(within, written)

    chunks = [jnp.moveaxis(x, 2, 0) for x in (new, old, q * from_start, within, k * to_end)]
    state, out = lax.scan(step, state, (*chunks, kept))
    out = jnp.moveaxis(out, (0, 2), (1, 3))  # [runs, chunks, chunk, heads, ...]
    return (state, own[:, 0, -1, -1:]), out.reshape(out.shape[0], -1, *out.shape[3:])


def _inverse(system: jax.Array) -> jax.Array:
    """Return the inverses of unit lower triangular matrices of ``CHUNK`` rows, from the inverses of their diagonal blocks.

    The inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']]. jaxlib's batched solve waits for ever on CPUs: the threads of
    the devices wait for tasks that only these threads could run.
    """
    blocks = jnp.ones_like(system[..., :1, None])
    while (size := blocks.shape[-1]) < system.shape[-1]:
        pairs = system.reshape(*system.shape[:-2], *(system.shape[-1] // (2 * size), 2, size) * 2)[..., 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
        upper, lower = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
        corner = -matmul(lower, matmul(below, upper))
        blocks = jnp.block([[upper, jnp.zeros_like(upper)], [corner, lower]])
    return blocks[..., 0, :, :]


def _pairs(x: jax.Array, y: jax.Array, c: jax.Array, same: jax.Array) -> jax.Array:
    """Return ``sum_k x_ik y_jk exp(c_ik - c_jk)`` of each pair (i, j) of a chunk's tokens for which ``same`` is True, else 0."""
    if c.shape[-1] == 1:
        return matmul(x, jnp.swapaxes(y, -1, -2)) * _exp(c - jnp.swapaxes(c, -1, -2), same)
    decay = _exp(c[..., :, None, :] - c[..., None, :, :], same[..., None])
    return jnp.einsum("...ik,...jk,...ijk->...ij", x, y, decay, precision=EXACT)


def _exp(x: jax.Array, where: jax.Array) -> jax.Array:
    """Return exp(x) where ``where`` is True, else 0, with gradients that are never NaN."""
    return jnp.where(where, jnp.exp(jnp.where(where, x, 0)), 0)
