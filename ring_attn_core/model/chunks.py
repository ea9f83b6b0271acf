"""Chunk lengths and argument checks for the loss and the MLP, which are computed in chunks of tokens.

    total = sum_i w_i (log sum_v exp(logits_iv) - logits_il)             l: the label of token i, w_i: its weight, 1 by default
    dlogits_iv = w_i (softmax(logits_i)_v - [v = l])                     [v = l]: 1 if v is the label, else 0
    dhidden = dlogits head,  dhead = dlogits^T hidden                    if logits = hidden head^T

Log-probability and entropy, with dx the gradient of the caller's loss with respect to x:

    logp_i = logits_il - log sum_v exp(logits_iv)                        logits after temperature
    H_i    = - sum_v p_iv log p_iv                                       p_i = softmax(logits_i)
    dlogits_iv = dlogp_i ([v = l] - p_iv) - dH_i p_iv (log p_iv + H_i)
"""

from __future__ import annotations

import math
from typing import Any

from ..problem.checks import DTYPES
from ..validation import in_words, is_integer

REDUCTIONS = ("mean", "sum")

Shape = tuple[int, ...]


def check_chunk(name: str, chunk: Any) -> None:
    if not is_integer(chunk) or chunk < 1:
        raise ValueError(f"{name} is a number of tokens, an int of at least 1, got {in_words(chunk)}")


def even_chunk(tokens: int, chunk: int) -> int:
    """Return the length that cuts ``tokens`` evenly into the fewest chunks of at most ``chunk``; the last may be shorter."""
    chunks = max(-(-tokens // chunk), 1)
    return max(-(-tokens // chunks), 1)


def check_loss(logits: Shape, labels: Shape, head: Shape | None, chunk: Any, reduction: Any) -> None:
    """Raise ValueError if the arguments of a loss do not fit. With a ``head``, ``logits`` is the shape of the hidden states."""
    what = "logits" if head is None else "hidden states"
    if len(logits) < 2:
        raise ValueError(f"{what} must be [batch, tokens, {'vocab' if head is None else 'dim'}], got {list(logits)}")
    if labels != logits[:-1]:
        raise ValueError(
            f"labels must be {list(logits[:-1])} for {what} {list(logits)}, got {list(labels)}: both are this rank's shard, so "
            "shard whole labels as the tokens are, with shard_batch"
        )
    if head is not None and (len(head) != 2 or head[1] != logits[-1]):
        raise ValueError(
            f"head must be [vocab, {logits[-1]}] for hidden states {list(logits)}, got {list(head)}: pass model.head_weight, or "
            "a weight of that orientation; where the first argument is logits, leave head out"
        )
    check_chunk("chunk", chunk)
    if reduction not in REDUCTIONS:
        raise ValueError(f'reduction must be "mean" or "sum", over all labels of all ranks, got {in_words(reduction)}')


def check_temperature(temperature: Any) -> None:
    if isinstance(temperature, bool) or not isinstance(temperature, float | int) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a finite Python number above 0, got {in_words(temperature)}")


def check_dtypes(logits: str, labels: str) -> None:
    if not labels.startswith(("int", "uint")):
        raise ValueError(f"labels must have an integer dtype, the id of the next token of each, got {labels}: convert them")
    if logits not in DTYPES:
        raise ValueError(f"logits and hidden states must have one of the dtypes {', '.join(DTYPES)}, got {logits}: convert them")


def check_weights(weights: Shape | None, labels: Shape) -> None:
    if weights is not None and weights != labels:
        raise ValueError(
            f"label_weights must be {list(labels)}, one for each label, got {list(weights)}: both are this rank's shard, so "
            "shard whole weights as the labels are, with to_layout"
        )
