"""The sum of one rank's cross-entropies, computed chunk by chunk by the formulas of the core's model/chunks.py.

A label outside the vocabulary makes three results NaN: the total, the gradient of that label's token, and the gradient of the
head. The label raises no error, because an error on one rank would leave the others waiting.

Temporary arrays [tokens, vocab] hold one chunk of tokens. Only the gradient of logits that the caller passed holds all tokens,
in the logits' dtype. Logits and softmax are computed in at least float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn_core.model.chunks import even_chunk

from ..ring.derivatives import one_derivative


class Labels(NamedTuple):
    """The int64 ``labels`` [n], the ``ignored`` one, and the most tokens of a ``chunk``. ``weights`` [n]: factors, 0 at ignored
    labels; None: 1. ``each``: return summands."""

    labels: Tensor
    ignored: int
    chunk: int
    weights: Tensor | None = None
    each: bool = False

    def weighted(self, x: Tensor, rows: slice) -> Tensor:
        """Multiply ``x`` [tokens, ...] in place by the weights of the tokens ``rows``, if there are weights. Return ``x``."""
        return x if self.weights is None else x.mul_(self.weights[rows].view(-1, *[1] * (x.ndim - 1)))

    @property
    def slices(self) -> Iterator[slice]:
        tokens = self.labels.shape[0]
        step = even_chunk(tokens, self.chunk)
        return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


Sums = tuple[Tensor, Tensor | None]
"""A weighted sum of cross-entropies, 0-d in at least float32, and the summands [n] if the labels ask for them."""


def order_free_sum(x: Tensor) -> Tensor:
    """Return the sum of ``x`` [n], the same bits for any order of its numbers and any count of zeros among them.
    Pairs are added, and pairs of pairs, the largest numbers first."""
    x = x.sort().values
    x = x[x.abs().argsort(stable=True, descending=True)]
    while len(x) > 1:
        x = F.pad(x, (0, len(x) % 2))
        x = x[0::2] + x[1::2]
    return x.sum()


def sum_of_logits(logits: Tensor, labels: Labels) -> Sums:
    if torch.is_grad_enabled() and logits.requires_grad:
        total, _, each = _SumOfLogits.apply(logits, *labels)  # type: ignore[misc]
    else:
        total, _, each = _of_logits(logits, labels)
    return total, each


def sum_of_hidden(hidden: Tensor, head: Tensor, labels: Labels) -> Sums:
    """Return the weighted sum of cross-entropies of ``hidden head^T`` [n vocab]. Products take hidden's (or autocast's)
    dtype; softmax and sums over tokens are at least float32."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype == torch.float32:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
            links = hidden[:0].clone(), head[:0].clone()
            return _SumOfHidden.apply(hidden, head, *labels, *links)  # type: ignore[return-value]
        return _of_hidden(hidden, head, labels, (False, False))[:2]


class _SumOfLogits(torch.autograd.Function):
    """The autograd function of ``sum_of_logits``. Its backward computes dlogits, in the dtype of the logits, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignored: int, chunk: int, weights: Tensor | None, each: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        total, lse, summed = _of_logits(logits, Labels(labels, ignored, chunk, weights, each))
        ctx.save_for_backward(logits, labels, lse, weights)
        ctx.mark_non_differentiable(lse, *([] if summed is None else [summed]))
        ctx.set_materialize_grads(False)
        ctx.settings = ignored, chunk
        return total, lse, summed

    @staticmethod
    @one_derivative
    def backward(ctx: Any, dtotal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        logits, labels, lse, weights = ctx.saved_tensors
        if dtotal is None:
            return (None,) * 6
        target = Labels(labels, *ctx.settings, weights=weights)
        dlogits = torch.empty_like(logits)
        for rows in target.slices:
            p = (logits[rows].to(lse.dtype) - lse[rows, None]).exp_()
            dlogits[rows] = target.weighted(_minus_one_hot(p, labels[rows], target.ignored).mul_(dtotal), rows)
        return dlogits, None, None, None, None, None


class _SumOfHidden(torch.autograd.Function):
    """The autograd function of ``sum_of_hidden``, whose forward computes the gradients. ``rest``: the last fields of Labels, and
    empty slices for ``one_derivative``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, ignored: int, chunk: int, *rest: Tensor | bool | None
    ) -> Sums:
        target = Labels(labels, ignored, chunk, *rest[:2])  # type: ignore[arg-type]
        total, each, *gradients = _of_hidden(hidden, head, target, ctx.needs_input_grad[:2])
        ctx.save_for_backward(*gradients, *rest[2:])
        if each is not None:
            ctx.mark_non_differentiable(each)
        ctx.dtype = head.dtype
        return total, each

    @staticmethod
    @one_derivative
    def backward(ctx: Any, dtotal: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        dhidden, dhead, *_ = ctx.saved_tensors  # type: ignore
        dhidden = None if dhidden is None else dhidden * dtotal
        dhead = None if dhead is None else (dhead * dtotal).to(ctx.dtype)
        return dhidden, dhead, *[None] * 7


def _of_logits(logits: Tensor, target: Labels) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the summed cross-entropy of ``logits`` [n vocab], each token's log-sum-exp [n], and the summands."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    total, lse = logits.new_zeros((), dtype=dtype), logits.new_empty(logits.shape[0], dtype=dtype)
    summed = torch.empty_like(lse) if target.each else None
    for rows in target.slices:
        wide, labels = logits[rows].to(dtype), target.labels[rows]
        lse[rows] = wide.logsumexp(-1)
        wrong = strange_labels(labels, target.ignored, wide.shape[-1])
        each = lse[rows] + F.nll_loss(
            wide, labels.masked_fill(wrong, target.ignored), ignore_index=target.ignored, reduction="none"
        )
        each = each.masked_fill_(labels == target.ignored, 0).masked_fill_(wrong, torch.nan)
        each = target.weighted(each, rows)
        total = total + each.sum()
        if summed is not None:
            summed[rows] = each
    return total, lse, summed


def _of_hidden(
    hidden: Tensor, head: Tensor, target: Labels, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return (summed cross-entropy, summands, dhidden, dhead in at least float32). A gradient not ``wanted`` is None."""
    dtype, weight = torch.promote_types(hidden.dtype, torch.float32), head.to(hidden.dtype)
    total = hidden.new_zeros((), dtype=dtype)
    summed = hidden.new_empty(hidden.shape[0], dtype=dtype) if target.each else None
    dhidden = torch.empty_like(hidden) if wanted[0] else None
    dhead = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
    for rows in target.slices:
        labels = target.labels[rows]
        ignored = (labels == target.ignored)[:, None]
        x = hidden[rows].masked_fill(ignored, 0)  # hidden states of ignored labels may be NaN
        p = F.log_softmax(_product(x, weight.t(), dtype), -1)
        wrong = strange_labels(labels, target.ignored, p.shape[-1])
        kept = labels.masked_fill(wrong, target.ignored)
        if target.weights is None and summed is None:
            part = F.nll_loss(p, kept, ignore_index=target.ignored, reduction="sum")
        else:
            each = target.weighted(F.nll_loss(p, kept, ignore_index=target.ignored, reduction="none"), rows)
            part = each.sum()
            if summed is not None:
                summed[rows] = each
        total = total + part.masked_fill(wrong.any(), torch.nan)
        if dhidden is None and dhead is None:
            continue
        dlogits = target.weighted(_minus_one_hot(p.exp_(), labels, target.ignored), rows).to(hidden.dtype)
        if dhidden is not None:
            dhidden[rows] = dlogits @ weight
        if dhead is not None:
            dhead = _plus_product(dhead, dlogits.t(), x)
    return total, summed, dhidden, dhead


def strange_labels(labels: Tensor, ignored: int, vocab: int) -> Tensor:
    return (labels != ignored) & ((labels < 0) | (labels >= vocab))


def _plus_at_labels(x: Tensor, added: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Add ``added`` [n 1] to ``x`` [n vocab] at labels, in place. An ignored label's row becomes 0, an invalid one's NaN."""
    wrong = strange_labels(labels, ignored, x.shape[-1])[:, None]
    left_out = (labels == ignored)[:, None] | wrong
    x.masked_fill_(left_out, 0).masked_fill_(wrong, torch.nan)
    return x.scatter_add_(1, labels[:, None].masked_fill(left_out, 0), added.masked_fill(left_out, 0))


def _minus_one_hot(p: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return _plus_at_labels(p, p.new_full((len(p), 1), -1), labels, ignored)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix product ``a b`` in ``dtype``. Devices other than CUDA first convert ``a`` and ``b`` to ``dtype``."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _plus_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype != total.dtype:
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.addmm_(a.to(total.dtype), b.to(total.dtype))
