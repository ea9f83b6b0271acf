"""The loss over all labels of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.mistakes import in_words
from ring_attn_core.model.chunks import check_loss
from ring_attn_core.problem.checks import check_number

from ..layers.attention import ring_of
from ..ring.agreement import Call, agree_on
from ..ring.groups import Group, is_dtensor, ranks_of
from .chunked import Labels, sum_of_hidden, sum_of_logits


def loss(
    logits: Tensor,
    labels: Tensor,
    *,
    head: Tensor | None = None,
    chunk: int = 4096,
    reduction: str = "mean",
    group: dist.ProcessGroup | DeviceMesh | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Mean cross-entropy over every label of every rank that is not ``ignore_index``, in float32: the same scalar on all ranks.

        sum_ranks sum_tokens (log sum_v exp(logits_v) - logits_label) / sum_ranks number of labels          0 without any label

    logits [b s vocab] and labels int [b s], the next token of each (``shard_batch`` shifts them before it shards). ``group``: all
    ranks that hold different tokens, data parallel ones included; None is the default group.

    ``head`` [vocab, dim]: the first argument is then the hidden states [b s dim], and the logits ``hidden head^T`` exist for
    ``chunk`` tokens of a rank at a time: ``loss(model(ids, ..., return_hidden=True), labels, head=model.head_weight)``. Gradients
    are those of the whole logits; they are computed in the forward, a chunk at a time, and held until the backward: hidden's in
    its dtype, the head's summed in float32. Products are in hidden's dtype, under autocast in autocast's, logits and softmax in
    float32.

    ``reduction="sum"`` leaves the division out. For gradient accumulation divide by the labels of all microbatches together
    (:func:`count_labels`): the mean of their means is not the mean over all labels.

    Its gradient on a rank is that rank's part of the gradient: the *sum* over the ranks (:func:`sum_gradients`) is one device's.
    DistributedDataParallel and FSDP take the mean over ranks: with them, multiply the loss by their number. Raises ValueError for
    shapes that do not fit and IndexError (on a GPU a device assertion) for labels outside the vocabulary. No second derivative.
    """
    ring = ring_of(group)

    def check() -> None:
        _check(ignore_index, {"logits": logits, "labels": labels} | ({} if head is None else {"head": head}))
        check_loss(tuple(logits.shape), tuple(labels.shape), None if head is None else tuple(head.shape), chunk, reduction)

    alike = ("ignore_index", ignore_index), ("reduction", reduction), ("head", head is not None)
    agree_on(Call("loss", _device(logits), alike), ring, check)
    tokens = Labels(labels.flatten().long(), ignore_index, chunk)  # unsigned ones have no place for ignore_index
    flat = logits.flatten(0, -2)
    part = sum_of_logits(flat, tokens) if head is None else sum_of_hidden(flat, head, tokens)
    return over_ranks(part, labels, ring, ignore_index, reduction)


def over_ranks(part: Tensor, labels: Tensor, ring: Group, ignore_index: int, reduction: str) -> Tensor:
    """The mean, or sum, over the labels of all ranks of ``ring``; ``part``: the sum over this rank's, 0-d, with a gradient."""
    total = torch.stack([part.detach(), _count(labels, ignore_index).to(part.dtype)])
    if ranks_of(ring) > 1:
        dist.all_reduce(total, group=ring)
    count = total[1].clamp(min=1) if reduction == "mean" else torch.ones_like(total[1])
    mine = part / count
    with torch.no_grad():
        mine.copy_(total[0] / count)  # everybody's value, equal to the bit, with the gradient of this rank's part
    return mine


def count_labels(labels: Tensor, *, group: dist.ProcessGroup | DeviceMesh | None = None, ignore_index: int = -100) -> Tensor:
    """How many labels of all ranks are not ``ignore_index``: what the mean of :func:`loss` divides by; int64, 0-d.

    labels: int, any shape. With gradient accumulation the gradient of the whole batch is that of the sum of its microbatches'
    ``loss(..., reduction="sum") / total``, where total is the sum of their counts, at least 1. Raises ValueError for what is no
    tensor.
    """
    ring = ring_of(group)
    call = Call("count_labels", _device(labels), (("ignore_index", ignore_index),))
    agree_on(call, ring, lambda: _check(ignore_index, {"labels": labels}))
    count = _count(labels, ignore_index)
    if ranks_of(ring) > 1:
        dist.all_reduce(count, group=ring)
    return count


def _count(labels: Tensor, ignore_index: int) -> Tensor:
    return (labels.long() != ignore_index).sum()


def _check(ignore_index: Any, given: dict[str, Any]) -> None:
    """ValueError for what is no tensor or a DTensor, and for an ignored label that is no number."""
    for name, x in given.items():
        if is_dtensor(x):
            raise ValueError(
                f"{name} is a DTensor: pass this rank's shard of logits and labels, {name}.to_local(), and the whole head; FSDP2 "
                "has gathered model.head_weight once the model's forward has run, so read it after that"
            )
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {in_words(x)}")
    check_number("ignore_index", ignore_index)


def _device(x: Any) -> str:
    return x.device.type if isinstance(x, Tensor) else "cpu"
