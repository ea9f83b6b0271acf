"""The gated delta rule of Qwen3-Next and the delta attention of Kimi, on shards (formulas in the core's problem/recurrence.py).

A run is computed once, from the state 0, together with the effect of a state, if any run needs one: K columns of 0 are appended
to the values, and start from the state I. The result is ``out + effect @ state`` with the state that earlier runs leave. Inside a
chunk of tokens the rule is a triangular system (the WY form); segments of chunks are recomputed in the backward.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ring_attn_core.problem.recurrence import check_delta_rule

from ..ring.halo import wide
from .exact import exactly
from .fla import check_fla, first_state, run_of_fla
from .runs import Layout, Ring, RunShard, Where, tie

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHUNK = {3: 64, 4: 16}
"""Tokens of a chunk, by the number of dims of g: with a decay for each channel a pair of tokens has K decays."""
SEGMENT = 16
"""Chunks that are recomputed together."""


def gated_delta_rule(
    q: Float[Tensor, "batch seq_local heads K"],
    k: Float[Tensor, "batch seq_local heads K"],
    v: Float[Tensor, "batch seq_local v_heads V"],
    g: Float[Tensor, "batch seq_local v_heads ..."],
    beta: Float[Tensor, "batch seq_local v_heads"],
    *,
    scale: float | None = None,
    normalize: bool = False,
    backend: str = "auto",
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Tensor, "rows seq_local 2"] | None = None,
) -> Float[Tensor, "batch seq_local v_heads V"]:
    """Compute the gated delta rule over a ring, each document from the state 0, forward and backward.

    Arguments (arrays are this rank's shards):
        q, k: ``[batch, s, heads, K]``; v: ``[batch, s, v_heads, V]``, ``heads`` dividing ``v_heads``: v's head h reads q's and
            k's head ``h // (v_heads / heads)``.
        g: the log of the decay, at most 0: ``[batch, s, v_heads]`` (gated delta net), or ``[batch, s, v_heads, K]`` (Kimi).
        beta: ``[batch, s, v_heads]``, how much of a value is written.
        scale: multiplies q; None: ``K ** -0.5``.
        normalize: divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        backend: "auto" or "blockwise", plain PyTorch in at least float32; "fla", the kernels of flash-linear-attention in v's
            dtype, for each run on a GPU.
        group, layout, length, extents: as in :func:`halo`. Padding gives 0.

    Returns ``[batch, s, v_heads, V]`` in v's dtype. Each rank sends a state and a matrix K x K for each head and run, whatever
    the length. Raise ValueError as :func:`halo` does, and if shapes do not fit.
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return delta_rule(arrays, Where(group, layout, length, extents), scale, normalize, backend)[0]


def delta_rule(
    arrays: dict[str, Tensor], where: Where, scale: float | None = None, normalize: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Compute ``gated_delta_rule`` from ``where.initial`` on. Return also the last state [batch, v_heads, K, V], if wanted."""
    q, k, v, g, beta = arrays.values()
    shapes = {name: tuple(x.shape) for name, x in arrays.items()}

    def check(_: object) -> None:
        if backend == "fla":
            check_fla(k, v, g, where.extents is not None)
        check_delta_rule(shapes, "auto" if backend == "fla" else backend)

    how = (*shapes.items(), scale, normalize, backend)
    shard = RunShard.of("gated_delta_rule", q, where, check, how)
    effect = bool(shard.order.slots) or where.initial is not None
    q, k, v32, g, beta = shard.zero_padding(*map(wide, arrays.values()))
    if normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    outs, ends = [], []
    for base, n, _ in shard.runs:
        run = partial(run_of_fla, v.dtype) if backend == "fla" and n else _run
        parts = [x[:, base : base + n] for x in (q, k, v32, g, beta)]
        out, end = run(parts, shard.documents_of(base, n, q.shape[0]), effect)
        outs.append(out)
        ends.append(end)
    last = None
    if effect or where.last:
        b, a = torch.stack(ends, 1).split([v.shape[-1], q.shape[-1] * effect], -1)
        states, last = shard.states(a if effect else None, b, where, True)
        outs = [exactly(_from_state, out, states[:, i]) for i, out in enumerate(outs)] if effect else outs
    return shard.join(outs).to(v.dtype), last


def _from_state(out: Tensor, state: Tensor) -> Tensor:
    out, effect = out.split([state.shape[-1], state.shape[-2]], -1)
    return out + torch.einsum("bthk,bhkv->bthv", effect, state)


def _run(arrays: list[Tensor], documents: Tensor | None, effect: bool) -> tuple[Tensor, Tensor]:
    """Return a run's [out | effect] [batch, n, heads, V + K] and [bias | transition]; without ``effect`` out and bias."""
    q, k, v, g, beta = arrays
    batch, n, heads, size = k.shape
    chunk = CHUNK[g.ndim]
    g = g[..., None] if g.ndim == 3 else g
    documents = torch.zeros(batch, n, dtype=torch.int32, device=q.device) if documents is None else documents
    columns = v.shape[-1] + size * effect
    state = tie(first_state(v, size, columns), k, v, g, beta)
    prior, outs = documents[:, :1], []
    for begin in range(0, n, chunk * SEGMENT):
        part = slice(begin, begin + chunk * SEGMENT)
        inputs = [x[:, part] for x in (q, k, v, g, beta, documents)]
        out, state = exactly(partial(_segment, chunk), *inputs, prior, state)
        prior = documents[:, part][:, -1:]
        outs.append(out)
    return (torch.cat(outs, 1) if outs else tie(v.new_zeros(batch, 0, heads, columns), q, k, v, g, beta)), state


def _segment(chunk: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a segment of chunks, and the state after it. ``prior``: the document that ``state`` belongs to."""
    (q, k, v, g, beta, documents, prior, state), n = inputs, inputs[0].shape[1]
    cut = lambda x: F.pad(x, (*[0, 0] * (x.ndim - 2), 0, -n % chunk)).unflatten(1, (-1, chunk)).transpose(2, 3).transpose(1, 2)
    q, k, v, g, beta = (
        cut(x) for x in (q, k, F.pad(v, (0, state.shape[-1] - v.shape[-1])), g, beta[..., None])
    )  # [batch, heads, chunks, chunk, ...]
    last = documents[:, -1:].expand(-1, -n % chunk)
    own = torch.cat([documents, last], 1).unflatten(1, (-1, chunk))[:, None]
    prior = torch.cat([prior[:, None], own[:, :, :-1, -1]], 2)
    c = g.cumsum(-2)
    same = (own[..., :, None] == own[..., None, :]).tril()
    reads, stays = (own == prior[..., None])[..., None], (own == own[..., -1:])[..., None]
    from_start = torch.where(reads, c, -torch.inf).exp()
    to_end = torch.where(stays, c[..., -1:, :] - c, -torch.inf).exp()
    system = torch.eye(chunk, dtype=q.dtype, device=q.device) + _pairs(k * beta, k, c, same).tril(-1)
    right = torch.cat([v * beta, k * beta * from_start], -1)
    new, old = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
    within = _pairs(q, k, c, same)
    outs = []
    for i in range(q.shape[2]):
        written = new[:, :, i] - old[:, :, i] @ state
        outs.append((q * from_start)[:, :, i] @ state + within[:, :, i] @ written)
        kept = torch.where((own[:, :, i, -1] == prior[:, :, i])[..., None, None], c[:, :, i, -1, :, None].exp(), 0)
        state = state * kept + (k * to_end)[:, :, i].mT @ written
    return torch.cat(outs, 2).transpose(1, 2)[:, :n], state


def _pairs(x: Tensor, y: Tensor, c: Tensor, same: Tensor) -> Tensor:
    """Return ``sum_k x_ik y_jk exp(c_ik - c_jk)`` of each pair (i, j) of a chunk's tokens for which ``same`` is True, else 0."""
    if c.shape[-1] == 1:
        return (x @ y.mT) * torch.where(same, c - c.mT, -torch.inf).exp()
    decay = torch.where(same[..., None], c[..., :, None, :] - c[..., None, :, :], -torch.inf).exp()
    return torch.einsum("...ik,...jk,...ijk->...ij", x, y, decay)
