"""Attention of given shards: the state that is carried from step to step, and the backend that moves it on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import blockwise
from .blockwise import Rows, State, accumulation_dtype

BACKENDS = {"blockwise": blockwise}


class Score(NamedTuple):
    """What makes a score of q . k, and who computes it."""

    scale: float
    backend: str


def pack(k: Tensor, v: Tensor) -> Tensor:
    """k [b t g d], v [b t g e] -> kv [b t g d+e], the one array that travels."""
    return torch.cat([k, v], -1)


def nothing(q: Tensor, kv: Tensor) -> State:
    """The (out, lse) of no keys at all: out 0 and lse -inf, in the accumulation dtype."""
    b, s, h, d = q.shape
    dtype = accumulation_dtype(q.dtype)
    return q.new_zeros((b, s, h, kv.shape[-1] - d), dtype=dtype), q.new_full((b, s, h), -math.inf, dtype=dtype)


def attend(q: Tensor, kv: Tensor, rows: Rows, score: Score, total: State, last: bool) -> State:
    """``total`` with the visible keys of ``kv`` merged in; the last step casts out to q's dtype."""
    out, lse = BACKENDS[score.backend].attend(q, kv, rows, score.scale, total)
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
    q: Tensor, kv: Tensor, rows: Rows, score: Score, lse: Tensor, delta: Tensor, dout: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """(dq with the part of these keys added, dkv of these keys), both in the accumulation dtype."""
    return BACKENDS[score.backend].attend_backward(q, kv, rows, score.scale, lse, delta, dout, dq)
