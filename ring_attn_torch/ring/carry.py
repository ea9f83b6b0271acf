"""The states that earlier runs leave: affine maps of all runs, folded in order of position on each rank or on each rank's heads.

    state before the next run = a @ state + b        (a: a matrix, or a decay multiplied elementwise)

The backward is the same fold in reverse order with transposed maps. Ranks exchange all maps; or, if that is less, each gets the
maps of some heads and sends the states back. Both give the same bits. The size of a message does not depend on the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.plan.run_order import RunOrder, splits_heads

from .derivatives import one_derivative
from .groups import group_of, rank_in, ranks_of
from .halo import all_gather, take


def fold_runs(a: Tensor, b: Tensor, order: RunOrder, ring: dist.ProcessGroup | None, matrix: bool) -> Tensor:
    """Return the state before each run, [batch, runs, heads, K, V], differentiable.

    ``b`` [batch, runs, heads, K, V]: what each run adds. ``a``: its transition [batch, runs, heads, K, K] if ``matrix``, else a
    decay whose last two dims broadcast to b's; 0 if a document begins in the run.
    """
    return _Fold.apply(a, b, order, "" if ring is None else ring.group_name, matrix)  # type: ignore[no-any-return]


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, order: RunOrder, name: str, matrix: bool) -> Tensor:
        ring, runs = group_of(name), b.shape[1]
        rank, split = rank_in(ring), splits_heads(order.ranks, b.shape[2])
        sent = _runs_to_send(order, rank, b.device)
        maps = take(torch.cat([a.flatten(3), b.flatten(3)], -1), sent)
        ga, gb = _spread(maps, ring, split).split([a.shape[3:].numel(), b.shape[3:].numel()], -1)
        ga, gb = ga.unflatten(-1, a.shape[3:]), gb.unflatten(-1, b.shape[3:])
        states = gb.new_zeros(ranks_of(ring), gb.shape[1], runs, *gb.shape[3:])
        before, state = torch.zeros_like(gb), torch.zeros_like(gb[0, :, :1]).squeeze(1) if order.slots else states[0, :, 0]
        for r, i, slot in _events(order):
            states[r, :, i] = state
            if slot is not None:
                before[r, :, slot] = state
                state = apply_map(ga[r, :, slot], state, matrix) + gb[r, :, slot]
        ctx.save_for_backward(ga, before)
        ctx.kept = order, name, matrix, split, a.shape, b.shape
        return _collect(states, ring, split, b.shape[2])

    @staticmethod
    @one_derivative
    def backward(ctx: Any, dstates: Tensor) -> tuple[Tensor | None, ...]:
        ga, before = ctx.saved_tensors
        order, name, matrix, split, a_shape, b_shape = ctx.kept
        ring = group_of(name)
        rank = rank_in(ring)
        sent, own = _runs_to_send(order, rank, dstates.device), len(order.senders[rank])
        spread = _spread(dstates.flatten(3), ring, split).unflatten(-1, b_shape[3:])
        db, dstate = torch.zeros_like(before), torch.zeros_like(spread[0, :, 0])
        for r, i, slot in reversed([*_events(order)]):
            if slot is not None:
                db[r, :, slot] = dstate
                dstate = apply_map(ga[r, :, slot].mT if matrix else ga[r, :, slot], dstate, matrix)
            dstate = dstate + spread[r, :, i]
        with exact_products(db):
            da = db @ before.mT if matrix else (db * before).sum_to_size(ga.shape)
        maps = _collect(torch.cat([da.flatten(4), db.flatten(4)], -1), ring, split, b_shape[2])
        dmaps = maps.new_zeros(*b_shape[:2], *maps.shape[2:]).index_copy_(1, sent[:own], maps[:, :own])
        da, db = dmaps.split([a_shape[3:].numel(), b_shape[3:].numel()], -1)
        return da.reshape(a_shape), db.reshape(b_shape), None, None, None


@lru_cache(maxsize=64)
def _runs_to_send(order: RunOrder, rank: int, device: torch.device) -> Tensor:
    """Return the runs whose maps a rank sends, padded by -1, kept on the device: a copy from the host would wait for the GPU."""
    return torch.tensor(order.sent[rank], dtype=torch.long, device=device)


def _events(order: RunOrder) -> Iterator[tuple[int, int, int | None]]:
    """Yield (rank, run, slot) of each run in order of position; the slot of its map, or None if no run needs its state."""
    for rank, run in order.order:
        senders = order.senders[rank]
        yield rank, run, senders.index(run) if run in senders else None


def apply_map(a: Tensor, state: Tensor, matrix: bool) -> Tensor:
    """Return ``a @ state`` if ``matrix``, else ``a * state``."""
    with exact_products(state):
        return a @ state if matrix else a * state


@contextmanager
def exact_products(x: Tensor) -> Iterator[None]:
    """Multiply matrices on x's device in their own dtype, without tf32 and autocast. In tf32 16 maps are wrong by 8e-4."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        with torch.autocast(x.device.type, enabled=False):
            yield
    finally:
        matmul.fp32_precision = before


def _spread(x: Tensor, ring: dist.ProcessGroup | None, split: bool) -> Tensor:
    """Give each rank [batch, n, heads, ...] of every rank, or if ``split`` of its own heads: [ranks, batch, n, heads, ...]."""
    ranks = ranks_of(ring)
    if not split:
        return all_gather(x[:, None], ring).movedim(1, 0)
    padded = torch.cat([x, x.new_zeros(*x.shape[:2], -x.shape[2] % ranks, *x.shape[3:])], 2)
    return _swap(padded.unflatten(2, (ranks, -1)).movedim(2, 0), ring)


def _collect(x: Tensor, ring: dist.ProcessGroup | None, split: bool, heads: int) -> Tensor:
    """Return what each rank gets of [ranks, batch, n, heads, ...], the inverse of ``_spread``: [batch, n, heads, ...]."""
    return _swap(x, ring).movedim(0, 2).flatten(2, 3)[:, :, :heads] if split else x[rank_in(ring)]


def _swap(x: Tensor, ring: Any) -> Tensor:
    sent = x.contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=ring)
    return arrived
