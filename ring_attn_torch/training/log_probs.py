"""Each label's log-probability and each token's entropy, by the formulas of the core's model/chunks.py.

The backward recomputes logits from hidden states. For memory and precision see ``cross_entropy.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_attn_core.model.chunks import check_dtypes, check_loss, check_temperature

from ..ring.derivatives import one_derivative
from .cross_entropy import Labels, _plus_at_labels, _plus_product, _product, strange_labels
from .loss import _check


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    head: Tensor | None = None,
    chunk: int = 4096,
    entropy: bool = False,
    ignore_index: int = -100,
    temperature: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return each label's log-probability [b s] in at least float32, or with ``entropy=True`` (log-probability, entropy).

    ``logits`` [b s vocab]. ``labels`` int [b s]: each token's next token, as ``pack_rollouts`` and ``shard_batch`` return them.
    Log-probability and entropy are 0 if the label is ``ignore_index``. They are NaN if the label is outside the vocabulary.
    Such a label raises no error, because an error on one rank would leave the others waiting.

    ``temperature``: the logits are divided by this number first, as for sampling.

    ``head`` [vocab, dim]: if passed, the first argument must be hidden states [b s dim] instead of logits. The logits
    ``hidden head^T`` then exist for at most ``chunk`` tokens at a time, and the backward recomputes them. Matrix products take
    inputs in hidden's dtype. Under autocast, float32 hidden states are first cast to autocast's dtype. Logits, softmax and sums
    over tokens, such as the head's gradient, are in at least float32. Second derivatives are not supported.

    Each rank computes its own tokens; nothing is sent. Raise ValueError if shapes or dtypes do not fit.
    """
    _check(ignore_index, {"logits": logits, "labels": labels} | ({} if head is None else {"head": head}))
    check_dtypes(str(logits.dtype).removeprefix("torch."), str(labels.dtype).removeprefix("torch."))
    check_loss(tuple(logits.shape), tuple(labels.shape), None if head is None else tuple(head.shape), chunk, "sum")
    check_temperature(temperature)
    tokens = Labels(labels.flatten().long(), ignore_index, chunk)
    x, device = logits.flatten(0, -2), logits.device.type
    if head is not None and torch.is_autocast_enabled(device) and x.dtype == torch.float32:
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or (head is not None and head.requires_grad)):
            values: Any = _Values.apply(x, head, tokens.labels, (ignore_index, chunk, temperature), entropy)
        else:
            values = _values(x, head, tokens, entropy, temperature)[:2]
    shaped = tuple(each.view(labels.shape) for each in values if each is not None)
    return shaped if entropy else shaped[0]  # type: ignore[return-value]


class _Values(torch.autograd.Function):
    """The autograd function of ``token_log_probs``. The backward recomputes logits and, by the saved lse, probabilities."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor | None, labels: Tensor, settings: tuple[int, int, float], entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logp, h, lse = _values(x, head, Labels(labels, *settings[:2]), entropy, settings[2])
        ctx.save_for_backward(x, head, labels, lse, h)
        ctx.settings, ctx.temperature = settings[:2], settings[2]
        return logp, h

    @staticmethod
    @one_derivative
    def backward(ctx: Any, dlogp: Tensor, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        x, head, labels, lse, h = ctx.saved_tensors
        target, weight = Labels(labels, *ctx.settings), None if head is None else head.to(x.dtype)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dhead = None if head is None or not ctx.needs_input_grad[1] else torch.zeros_like(head, dtype=lse.dtype)
        with torch.autocast(x.device.type, enabled=False):  # a backward inside autocast would compute other logits
            for rows in target.slices:
                kept, logits = _logits(x[rows], weight, labels[rows], target.ignored, lse.dtype, ctx.temperature)
                logp = logits.sub_(lse[rows, None])
                p = logp.exp()
                factor = dlogp[rows, None]
                if h is not None and dh is not None:
                    factor = logp.add_(h[rows, None]).mul_(dh[rows, None]).add_(factor).masked_fill_(p == 0, 0)
                dlogits = _plus_at_labels(p.mul_(factor).neg_(), dlogp[rows, None], labels[rows], target.ignored)
                narrow = dlogits.div_(ctx.temperature).to(x.dtype)
                if dx is not None:
                    dx[rows] = narrow if weight is None else narrow @ weight
                if dhead is not None:
                    dhead = _plus_product(dhead, narrow.t(), kept)
        return dx, None if head is None or dhead is None else dhead.to(head.dtype), *[None] * 3


def _values(
    x: Tensor, head: Tensor | None, target: Labels, entropy: bool, temperature: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return each token's log-probability, entropy or None, and log-sum-exp. ``x``: hidden states, without ``head`` logits."""
    dtype, weight = torch.promote_types(x.dtype, torch.float32), None if head is None else head.to(x.dtype)
    logp, lse = (x.new_empty(x.shape[0], dtype=dtype) for _ in range(2))
    h = torch.empty_like(lse) if entropy else None
    for rows in target.slices:
        labels = target.labels[rows]
        _, logits = _logits(x[rows], weight, labels, target.ignored, dtype, temperature)
        ignored, wrong = labels == target.ignored, strange_labels(labels, target.ignored, logits.shape[-1])
        lse[rows] = logits.logsumexp(-1)
        chosen = logits.gather(1, labels[:, None].masked_fill((ignored | wrong)[:, None], 0))[:, 0]
        logp[rows] = (chosen - lse[rows]).masked_fill_(ignored, 0).masked_fill_(wrong, torch.nan)
        if h is not None:
            every = logits.sub_(lse[rows, None])
            p = every.exp()
            each = -(every.mul_(p).masked_fill_(p == 0, 0)).sum(-1)
            h[rows] = each.masked_fill_(ignored, 0).masked_fill_(wrong, torch.nan)
    return logp, h, lse


def _logits(
    x: Tensor, weight: Tensor | None, labels: Tensor, ignored: int, dtype: torch.dtype, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return ``x`` with 0 for ignored labels, whose rows may be NaN, and its logits [n vocab] over ``temperature``."""
    x = x.masked_fill((labels == ignored)[:, None], 0)
    return x, (x.to(dtype) if weight is None else _product(x, weight.t(), dtype)).div_(temperature)
