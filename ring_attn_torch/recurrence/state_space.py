"""The state spaces of Mamba-2 and Mamba-1 on shards, whose formulas the core's problem/recurrence.py has.

A run's effect on the state is a decay in closed form. Mamba-2 adds the effect of the carried state to the result from the state
0. In Mamba-1 this costs as much as a scan, so it scans a second time, from the carried state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ring_attn_core.problem.recurrence import check_state_space

from ..ring.halo import wide
from .exact import exactly
from .runs import Layout, Ring, RunShard, Where, tie

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHUNK = 64
"""Tokens that are computed together, and whose intermediate results are recomputed in the backward."""


def state_space(
    x: Float[Tensor, "batch seq_local ..."],
    dt: Float[Tensor, "batch seq_local heads"],
    A: Float[Tensor, " heads"] | Float[Tensor, "heads N"],
    B: Float[Tensor, "batch seq_local ... N"],
    C: Float[Tensor, "batch seq_local ... N"],
    *,
    D: Float[Tensor, " heads"] | None = None,
    backend: str = "auto",
    group: Ring = None,
    layout: Layout = "zigzag",
    length: int | None = None,
    extents: Int[Tensor, "rows seq_local 2"] | None = None,
) -> Float[Tensor, "batch seq_local ..."]:
    """Compute the state space of Mamba-2 or Mamba-1 over a ring, each document from the state 0, forward and backward.

    Arguments (arrays but A and D are this rank's shards):
        A: ``[heads]``, at most 0, for Mamba-2; ``[channels, N]`` for Mamba-1.
        x: ``[batch, s, heads, P]`` for Mamba-2; ``[batch, s, channels]`` for Mamba-1.
        dt: the step sizes after softplus, ``[batch, s, heads]`` or ``[batch, s, channels]``.
        B, C: ``[batch, s, groups, N]``, ``groups`` dividing ``heads``, or ``[batch, s, N]``.
        D: ``[heads]`` or ``[channels]``: adds ``D x``.
        backend: "auto" or "blockwise", plain PyTorch in at least float32.
        group, layout, length, extents: as in :func:`halo`. Padding gives 0.

    Returns x's shape and dtype. Each rank sends a state for each head and run, whatever the length. The gradients of A and D are
    of this rank's tokens: add them over the ranks. Raise ValueError as :func:`halo` does, and if shapes do not fit.
    """
    arrays = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    return scan(arrays, Where(group, layout, length, extents), backend)[0]


def scan(arrays: dict[str, Any], where: Where, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute ``state_space`` from ``where.initial`` on. Return also the last state, if wanted."""
    x, dt, A, B, C, D = arrays.values()
    shapes = {name: None if each is None else tuple(each.shape) for name, each in arrays.items()}
    check = lambda _: check_state_space(shapes, backend)
    shard = RunShard.of("state_space", x, where, check, (*shapes.items(), backend))
    u, dt, B, C = shard.zero_padding(*map(wide, (x, dt, B, C)))
    A, rule = wide(A), _selective if A.ndim == 2 else _run_structured
    runs = [(slice(base, base + n), shard.documents_of(base, n, x.shape[0])) for base, n, _ in shard.runs]
    arrays_of = [(u[:, part], dt[:, part], B[:, part], C[:, part], documents) for part, documents in runs]
    out, last = rule(shard, arrays_of, A, where)
    if D is not None:
        out = out + wide(D).view(-1, *[1] * (x.ndim - 3)) * u
    return out.to(x.dtype), last


Run = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""The arrays x, dt, B, C of one run, and the documents of its tokens."""


def _run_structured(shard: RunShard, runs: list[Run], A: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
    outs, ends, decays, effects = [], [], [], []
    carried, last = bool(shard.order.slots) or where.last, None
    for x, dt, B, C, documents in runs:
        B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (B, C))
        documents = _one_document(x) if documents is None else documents
        state, prior, parts = tie(x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[3]), x, dt, B), documents[:, :1], []
        for begin in range(0, x.shape[1], CHUNK):
            part = slice(begin, begin + CHUNK)
            inputs = [each[:, part] for each in (x * dt[..., None], dt * A, B, C, documents)]
            out, state = exactly(_run_structured_chunk, *inputs, prior, state)
            prior = documents[:, part][:, -1:]
            parts.append(out)
        outs.append(torch.cat(parts, 1) if parts else tie(x, dt * A, B, C))
        if not carried:
            continue
        c = (dt * A).cumsum(1)
        ends.append(state)
        decays.append((dt * A).sum(1).exp()[..., None, None])
        effects.append(C * torch.where((documents == documents[:, :1])[..., None], c, -torch.inf).exp()[..., None])
    if carried:
        states, last = shard.states(torch.stack(decays, 1), torch.stack(ends, 1), where, False)
        outs = [exactly(_from_state, out, effects[i], states[:, i]) for i, out in enumerate(outs)]
    return shard.join(outs), last


def _from_state(out: Tensor, effect: Tensor, state: Tensor) -> Tensor:
    return out + torch.einsum("bthn,bhpn->bthp", effect, state)


def _run_structured_chunk(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    x, log_decay, B, C = (each.transpose(1, 2) for each in inputs[:4])  # [batch, heads, tokens, ...]
    c, own, prior, state = log_decay.cumsum(-1), inputs[4][:, None], *inputs[5:]
    same = (own[..., :, None] == own[..., None, :]).tril()
    reads, stays = own == prior[..., None], own == own[..., -1:]
    out = ((C @ B.mT) * torch.where(same, c[..., :, None] - c[..., None, :], -torch.inf).exp()) @ x
    out = out + (C * torch.where(reads, c, -torch.inf).exp()[..., None]) @ state.mT
    kept = torch.where(own[..., -1:] == prior[..., None], c[..., -1:], -torch.inf).exp()[..., None]
    state = state * kept + (x * torch.where(stays, c[..., -1:] - c, -torch.inf).exp()[..., None]).mT @ B
    return out.transpose(1, 2), state


def _selective(shard: RunShard, runs: list[Run], A: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
    zeros = runs[0][0].new_zeros(runs[0][0].shape[0], *A.shape)
    found = [_scan(run, A, tie(zeros, *run[:3])) for run in runs]
    if not (shard.order.slots or where.last):
        return shard.join([out for out, _ in found]), None
    ends = torch.stack([end for _, end in found], 1)
    decays = torch.stack([(dt.sum(1)[..., None] * A).exp() for _, dt, *_ in runs], 1)
    where = where if where.initial is None else where._replace(initial=where.initial[:, None])  # channels are one head
    states, last = shard.states(decays[:, :, None], ends[:, :, None], where, False)
    out = shard.join([_scan(run, A, states[:, i, 0])[0] for i, run in enumerate(runs)])
    return out, None if last is None else last[:, 0]


def _scan(run: Run, A: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a run from the state before it, [batch, n, channels], and the state after it."""
    x, dt, B, C, documents = run
    documents = _one_document(x) if documents is None else documents
    new = torch.cat([torch.zeros_like(documents[:, :1]), documents.diff()], 1) != 0
    outs = []
    for begin in range(0, x.shape[1], CHUNK):
        part = slice(begin, begin + CHUNK)
        out, state = exactly(_scan_chunk, *(each[:, part] for each in (x, dt, B, C, new)), A, state)
        outs.append(out)
    return (torch.cat(outs, 1) if outs else tie(x + state.sum(-1)[:, None], C, dt[..., None] * A)), state


def _scan_chunk(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, new: Tensor, A: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compose the maps of a chunk's tokens by doubling: after step i each map is that of the last 2^i tokens."""
    a = torch.where(new[..., None, None], 0, (dt[..., None] * A).exp())
    b = (dt * x)[..., None] * B[:, :, None]
    span = 1
    while span < x.shape[1]:
        a_before, b_before = F.pad(a[:, :-span], (0, 0, 0, 0, span, 0), value=1), F.pad(b[:, :-span], (0, 0, 0, 0, span, 0))
        a, b = a * a_before, a * b_before + b
        span *= 2
    states = a * state[:, None] + b
    return torch.einsum("btdn,btn->btd", states, C), states[:, -1].clone()  # a view would keep all states


def _one_document(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[:2], dtype=torch.int32, device=x.device)
