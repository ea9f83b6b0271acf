"""The next token of each request, drawn from its logits on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_attn_core.sampling import Choice, words

from ..attend.dropout import multiply
from ..attend.tiles import accumulation_dtype


def sample(logits: Tensor, choice: Choice, requests: Tensor, positions: Tensor) -> Tensor:
    """int64 [b]: the tokens of ``requests`` [b] at ``positions`` [b], of logits [b vocab], as ``choice`` says.

    What :mod:`ring_attn_core.sampling` describes, in float32 (float64 for float64).
    """
    if choice.temperature is None:
        return logits.argmax(-1)
    wide = logits.to(accumulation_dtype(logits.dtype))
    scores = (wide - wide.amax(-1, keepdim=True)) / choice.temperature
    tokens = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    if choice.top_k is not None or choice.top_p is not None:
        scores, tokens = torch.sort(scores, dim=-1, descending=True, stable=True)
        if choice.top_k is not None:
            rank = torch.arange(scores.shape[-1], device=scores.device)
            scores = scores.masked_fill(rank >= choice.top_k, -torch.inf)
        if choice.top_p is not None:
            p = scores.softmax(-1)
            scores = scores.masked_fill(p.cumsum(-1) - p >= choice.top_p, -torch.inf)
    best = (scores + gumbel(choice, requests, positions, tokens, scores.dtype)).argmax(-1, keepdim=True)
    return tokens.gather(-1, best)[:, 0]


def gumbel(choice: Choice, requests: Tensor, positions: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """[b n]: the noise of each of ``tokens`` [b n], -log of exponential numbers that come from 32 random bits each."""
    at = requests.long()[:, None], positions.long()[:, None]
    bits = words((choice.low, choice.high), *at, tokens, (multiply, int))
    uniform = ((bits.to(dtype) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)  # float32 would round some of them to 1
    return -torch.log(-torch.log1p(-uniform))
