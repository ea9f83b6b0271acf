"""Attention of given shards: the state that is carried from step to step, and the backend that moves it on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import blockwise
from .blockwise import State
from .keys import Keys
from .score import Score
from .tiles import Rows, accumulation_dtype

BACKENDS = {"blockwise": blockwise}


def nothing(q: Tensor, keys: Keys, rows: Rows, score: Score) -> State:
    """The (out, lse) of no keys at all, in the accumulation dtype: out 0, lse the sink; without sinks and at padding -inf."""
    b, s, h, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    out, lse = q.new_zeros((b, s, h, keys.kv.shape[-1] - d), dtype=dtype), q.new_full((b, s, h), -math.inf, dtype=dtype)
    if score.sinks is not None:
        for row, *_ in rows:
            lse[:, row.q_base : row.q_base + row.q_len] = score.sinks
    return out, lse


def attend(q: Tensor, keys: Keys, rows: Rows, score: Score, total: State, last: bool) -> State:
    """``total`` with the visible ones of ``keys`` merged in; the last step casts out to q's dtype."""
    out, lse = BACKENDS[score.backend].attend(q, keys, rows, score, total)
    return (out.to(q.dtype) if last else out), lse


def seen_only(dout: Tensor, dlse: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The cotangents, 0 for queries that see nothing: whatever reaches those, NaN of a merge too, concerns no key."""
    unseen = lse == -math.inf
    return dout.masked_fill(unseen[..., None], 0), dlse.masked_fill(unseen, 0)


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
    """[b s h] of ``sum_e dout * out - dlse``: what the softmax takes off every score's gradient."""
    return torch.sum(dout.to(dlse.dtype) * out.to(dlse.dtype), -1) - dlse


def zero_gradient(x: Tensor) -> Tensor:
    """Zeros like ``x`` in the accumulation dtype."""
    return x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype))


def attend_backward(
    q: Tensor, keys: Keys, rows: Rows, score: Score, lse: Tensor, delta: Tensor, dout: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """(dq with the part of these keys added, dkv of these keys), both in the accumulation dtype."""
    return BACKENDS[score.backend].attend_backward(q, keys, rows, score, lse, delta, dout, dq)


def sink_gradient(score: Score, lse: Tensor, delta: Tensor) -> Tensor | None:
    """[h] of ``-sum_bs exp(sink - lse) delta``: a sink is a key whose value is 0. None without sinks."""
    if score.sinks is None:
        return None
    p = torch.where(lse == -math.inf, 0, torch.exp(score.sinks.to(lse.dtype) - lse))
    return -torch.sum(p * delta, (0, 1))
