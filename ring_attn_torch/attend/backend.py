"""Attention of given shards: the state that is carried from step to step, and the backend that moves it on."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import blockwise, vendor
from . import kernels as fused
from .keys import Keys
from .score import Score
from .state import Cotangents, Gradients, State
from .tiles import Rows, accumulation_dtype


def attend(q: Tensor, keys: Keys, rows: Rows, score: Score, total: State | None, last: bool) -> State:
    """``total`` (None: of no keys yet) with the visible ones of ``keys`` merged in; the last step gives out in q's dtype."""
    if score.call is not None:
        return fused.attend(q, keys, rows, score, total, last)
    backend = blockwise if score.vendor is None else vendor
    out, lse = backend.attend(q, keys, rows, score, nothing(q, keys, rows, score) if total is None else total)
    return (out.to(q.dtype) if last else out), lse


def nothing(q: Tensor, keys: Keys, rows: Rows, score: Score) -> State:
    """The (out, lse) of no keys at all, in the accumulation dtype: out 0, lse the sink; without sinks and at padding -inf."""
    b, s, h, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    out, lse = q.new_zeros((b, s, h, keys.kv.shape[-1] - d), dtype=dtype), q.new_full((b, s, h), -math.inf, dtype=dtype)
    if score.sinks is not None:
        for row, *_ in rows:
            lse[:, row.q_base : row.q_base + row.q_len] = score.sinks
    return out, lse


def cotangents(
    q: Tensor, keys: Keys, rows: Rows, score: Score, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor
) -> Cotangents:
    """What the backward needs of every query; 0 for those that see nothing: what reaches them, NaN too, concerns no key."""
    if score.call is not None:
        return fused.cotangents(q, keys, rows, score, out, lse, dout, dlse)
    unseen = lse == -math.inf
    dout, dlse = dout.masked_fill(unseen[..., None], 0), dlse.masked_fill(unseen, 0)
    delta = torch.sum(dout.to(lse.dtype) * out.to(lse.dtype), -1) - dlse
    return Cotangents(q, dout, lse, delta, out=None if score.vendor is None else out)


def attend_backward(
    of_q: Cotangents,
    keys: Keys,
    rows: Rows,
    score: Score,
    dq: Tensor | None,
    arrived: Callable[[], Tensor | None],
    last: bool,
) -> tuple[Tensor, Gradients]:
    """``dq`` (None: nothing yet) with the part of these keys added, and dkv of these keys added to what ``arrived`` for them.

    In the accumulation dtype, or in q's where nothing will be added any more.
    """
    if score.call is not None:
        return fused.attend_backward(of_q, keys, rows, score, dq, arrived, last)
    dq = of_q.q.new_zeros(of_q.q.shape, dtype=accumulation_dtype(of_q.q.dtype)) if dq is None else dq
    backend = blockwise if score.vendor is None else vendor
    dq, dkv = backend.attend_backward(of_q, keys, rows, score, dq)
    before = arrived()
    return dq, dkv if before is None else dkv.add_(before)


def sink_gradient(score: Score, lse: Tensor, of_q: Cotangents) -> Tensor | None:
    """[h] of ``-sum_bs exp(sink - lse) delta``: a sink is a key whose value is 0. None without sinks."""
    if score.sinks is None:
        return None
    delta = of_q.delta if score.call is None else of_q.delta.transpose(1, 2)
    p = torch.where(lse == -math.inf, 0, torch.exp(score.sinks.to(lse.dtype) - lse))
    return -torch.sum(p * delta, (0, 1))
