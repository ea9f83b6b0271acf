"""The cross-entropy loss over all labels of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.model.chunks import check_loss
from ring_attn_core.problem.checks import check_number
from ring_attn_core.validation import in_words

from ..call.autograd import unwatched
from ..ring.agreement import AgreedCall, agree_on, tell
from ..ring.groups import Group, is_dtensor, ranks_of, ring_of
from .cross_entropy import Labels, strange_labels, sum_of_hidden, sum_of_logits


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
    """Return the float32 mean cross-entropy over all labels of all ranks except ``ignore_index``, the same scalar on all ranks.

        sum_ranks sum_tokens (log sum_v exp(logits_v) - logits_label) / sum_ranks number of labels          0 without any label

    ``logits`` [b s vocab] and ``labels`` int [b s], the next token of each (``shard_batch`` shifts them before it shards).
    ``group``: all ranks that hold different tokens, data parallel ones included; None is the default group.

    ``head`` [vocab, dim]: the first argument is then the hidden states [b s dim], and the logits ``hidden head^T`` exist for
    ``chunk`` tokens of a rank at a time: ``loss(model(ids, ..., return_hidden=True), labels, head=model.head_weight)``. Gradients
    are those of the full logits; they are computed in the forward, a chunk at a time, and stored until the backward: hidden's in
    its dtype, the head's summed in float32. Products are in hidden's dtype, or in autocast's under autocast; logits and softmax
    are float32.

    ``reduction="sum"`` leaves the division out. For gradient accumulation divide by the number of labels in all microbatches
    (:func:`count_labels`): the mean of their means is not the mean over all labels.

    A rank's gradient is its part of the gradient: the *sum* over the ranks (:func:`sum_gradients`) is that of one device.
    DistributedDataParallel and FSDP take the mean over ranks: with them, multiply the loss by the number of ranks. Second
    derivatives are not supported.

    Raise ValueError, the same on every rank, if shapes do not fit or, on CPUs, if a label of any rank is outside the vocabulary;
    on GPUs and under torch.compile, such a label makes the loss and its gradients NaN on every rank.
    """
    ring = ring_of(group)

    def check() -> None:
        _check(ignore_index, {"logits": logits, "labels": labels} | ({} if head is None else {"head": head}))
        check_loss(tuple(logits.shape), tuple(labels.shape), None if head is None else tuple(head.shape), chunk, reduction)

    alike = ("ignore_index", ignore_index), ("reduction", reduction), ("head", head is not None)
    agree_on(AgreedCall("loss", _device(logits), alike), ring, check)
    tokens = Labels(labels.flatten().long(), ignore_index, chunk)  # unsigned dtypes cannot hold ignore_index
    flat = logits.flatten(0, -2)
    part = sum_of_logits(flat, tokens) if head is None else sum_of_hidden(flat, head, tokens)
    return over_ranks(part, labels, ring, ignore_index, reduction, flat.shape[-1] if head is None else head.shape[0])


def over_ranks(part: Tensor, labels: Tensor, ring: Group, ignore_index: int, reduction: str, vocab: int | None = None) -> Tensor:
    """Return the mean, or sum, over the labels of all ranks of ``ring``.

    ``part``: the sum over this rank's labels, 0-d, with a gradient. ``vocab``: the number of ids; on CPUs, raise ValueError on
    every rank if a label is outside them. The count of such labels is summed together with the loss, so no rank stops before the
    others have taken part. On GPUs the count is not read, which would wait: the loss and its gradient become NaN instead.
    """
    strange = labels.new_zeros(()) if vocab is None else strange_labels(labels.long(), ignore_index, vocab).sum()
    total = torch.stack([x.to(part.dtype) for x in (part.detach(), _count(labels, ignore_index), strange)])
    if ranks_of(ring) > 1:
        dist.all_reduce(total, group=ring)
    if vocab is not None and part.device.type == "cpu" and unwatched([total]) and total[2]:
        raise _strange(labels, ring, ignore_index, vocab)
    count = total[1].clamp(min=1) if reduction == "mean" else torch.ones_like(total[1])
    count = count.masked_fill(total[2] > 0, torch.nan)  # which makes this rank's gradients NaN too
    mine = part / count
    with torch.no_grad():
        mine.copy_(total[0] / count)  # all ranks' value, bit for bit the same, with the gradient of this rank's part
    return mine


def _strange(labels: Tensor, ring: Group, ignore_index: int, vocab: int) -> ValueError:
    """Return the error that every rank raises if any rank has a label outside the vocabulary. Every rank must call it."""
    flat = labels.flatten().long()
    mine = flat[strange_labels(flat, ignore_index, vocab)][:1].tolist()
    everybody = [mine] if ranks_of(ring) == 1 else tell("the loss's labels", mine, ring)  # type: ignore[arg-type]
    rank = next(rank for rank, found in enumerate(everybody) if found)
    where = "" if ranks_of(ring) == 1 else f"rank {rank}: "
    return ValueError(
        f"{where}labels hold {everybody[rank][0]}, and a vocabulary of {vocab} has 0 to {vocab - 1}: make the model with the "
        f"vocab of the tokenizer, and give tokens that shall not count the label {ignore_index}, which is ignore_index"
    )


def count_labels(labels: Tensor, *, group: dist.ProcessGroup | DeviceMesh | None = None, ignore_index: int = -100) -> Tensor:
    """Return the number of labels on all ranks that are not ``ignore_index``, the divisor of :func:`loss`; int64, 0-d.

    ``labels``: int, any shape. With gradient accumulation the gradient of the whole batch is that of the sum of its microbatches'
    ``loss(..., reduction="sum") / total``, where total is the sum of their counts, at least 1. Raise ValueError if labels are not
    a tensor.
    """
    ring = ring_of(group)
    call = AgreedCall("count_labels", _device(labels), (("ignore_index", ignore_index),))
    agree_on(call, ring, lambda: _check(ignore_index, {"labels": labels}))
    count = _count(labels, ignore_index)
    if ranks_of(ring) > 1:
        dist.all_reduce(count, group=ring)
    return count


def _count(labels: Tensor, ignore_index: int) -> Tensor:
    return (labels.long() != ignore_index).sum()


def _check(ignore_index: Any, given: dict[str, Any]) -> None:
    """Raise ValueError if a value is a DTensor or not a tensor, or if the ignored label is not a number."""
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
