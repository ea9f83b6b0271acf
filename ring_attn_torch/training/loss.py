"""The cross-entropy loss over all labels of all ranks, each of whose sums ``cross_entropy.py`` computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.model.chunks import check_dtypes, check_loss, check_weights
from ring_attn_core.problem.strategies import check_order
from ring_attn_core.validation import check_integer, in_words

from ..call.autograd import eager_only
from ..ring.agreement import AgreedCall, agree_on, exchange
from ..ring.groups import Group, is_dtensor, ranks_of, ring_of
from ..ring.transfer import all_gather
from .cross_entropy import Labels, order_free_sum, strange_labels, sum_of_hidden, sum_of_logits


def loss(
    logits: Tensor,
    labels: Tensor,
    *,
    label_weights: Tensor | None = None,
    head: Tensor | None = None,
    chunk: int = 4096,
    reduction: str = "mean",
    order: str = "ring",
    group: dist.ProcessGroup | DeviceMesh | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the mean cross-entropy over all ranks' labels except ``ignore_index``, in at least float32, equal on all ranks.

        sum_ranks sum_tokens w (log sum_v exp(logits_v) - logits_label) / sum_ranks sum_tokens w            0 without any label

    ``logits`` [b s vocab]. ``labels`` int [b s]: each token's next token (``shard_batch`` shifts before it shards). ``group``:
    all ranks that hold different tokens, data-parallel ranks included; None is the default group.

    ``label_weights`` [b s]: the weight w of each label, as ``pack_rollouts`` returns them; None: 1. Weights get no gradient, and
    weights of ignored labels have no effect. The mean divides by the sum of all ranks' weights, however small; if that sum is 0,
    the mean is 0. A mean needs finite weights of at least 0; weights of any sign need ``reduction="sum"``.

    ``head`` [vocab, dim]: if passed, the first argument must be hidden states [b s dim] instead of logits. The logits
    ``hidden head^T`` then exist for at most ``chunk`` tokens of a rank at a time:
    ``loss(model(ids, ..., return_hidden=True), labels, head=model.head_weight)``. Up to rounding, gradients equal those of the
    full logits. The forward computes the gradients chunk by chunk, and stores them until the backward: that of hidden in
    hidden's dtype, that of the head in at least float32. Logits and softmax are in at least float32 too. Matrix products take
    inputs in hidden's dtype. Under autocast, float32 hidden states are first cast to autocast's dtype.

    ``reduction="sum"`` skips the division. For gradient accumulation, divide by the number of labels in all microbatches
    (:func:`count_labels`), or by the sum of all weights: a mean of the microbatches' means is not the mean over all labels.

    ``order="global"``: the loss, and the gradient of each token's logits, have the same bits on any number of ranks and in any
    layout, if the logits have. The gradient of the head is a matrix product, which does not.

    Each rank's gradient is partial: the *sum* over the ranks (:func:`sum_gradients`) is the gradient of one device.
    DistributedDataParallel and FSDP take the mean over ranks. If you use them, multiply the loss by the number of ranks. Second
    derivatives are not supported.

    Raise ValueError, the same on every rank, if shapes, dtypes or options do not fit. On CPUs raise it too if any rank has a
    label outside the vocabulary or, in a mean, a weight that is negative or not finite. On GPUs and under torch.compile such a
    label or weight makes the loss and its gradients NaN on every rank instead.
    """
    ring = ring_of(group)

    def check() -> None:
        arrays = {"logits": logits, "labels": labels, "head": head, "label_weights": label_weights}
        _check(ignore_index, {name: x for name, x in arrays.items() if x is not None or name in ("logits", "labels")})
        check_dtypes(str(logits.dtype).removeprefix("torch."), str(labels.dtype).removeprefix("torch."))
        check_loss(tuple(logits.shape), tuple(labels.shape), None if head is None else tuple(head.shape), chunk, reduction)
        check_weights(None if label_weights is None else tuple(label_weights.shape), tuple(labels.shape))
        check_order(order)

    alike = ("ignore_index", ignore_index), ("reduction", reduction), ("head", head is not None)
    alike = *alike, ("label_weights", label_weights is not None), ("order", order)
    if order == "global":
        alike = *alike, ("the number of tokens of a rank", labels.numel())
    agree_on(AgreedCall("loss", _device(logits), alike), ring, check)
    tokens = labels_of(labels, ignore_index, chunk, label_weights, torch.promote_types(logits.dtype, torch.float32))
    flat, tokens = logits.flatten(0, -2), tokens._replace(each=order == "global")
    part, each = sum_of_logits(flat, tokens) if head is None else sum_of_hidden(flat, head, tokens)
    return over_ranks(part, tokens, ring, reduction, flat.shape[-1] if head is None else head.shape[0], each)


def labels_of(labels: Tensor, ignore_index: int, chunk: int, weights: Tensor | None, dtype: torch.dtype) -> Labels:
    """Return labels [b s] and weights, flattened, as a Labels record. Weights are in ``dtype``, and 0 at ``ignore_index``."""
    flat = labels.flatten().long()  # unsigned dtypes cannot hold ignore_index
    if weights is not None:
        weights = weights.detach().flatten().to(flat.device, dtype).masked_fill(flat == ignore_index, 0)
    return Labels(flat, ignore_index, chunk, weights)


def over_ranks(
    part: Tensor, labels: Labels, ring: Group, reduction: str, vocab: int | None = None, each: Tensor | None = None
) -> Tensor:
    """Return the weighted mean (or sum) of the cross-entropies over the labels of all ranks of ``ring``.

    ``part``: the sum over this rank's labels, 0-d, with a gradient. ``each``: its summands [n]; then the results have the same
    bits on any number of ranks. An all-reduce also counts labels outside ``vocab`` and, for a mean, weights that are negative or
    not finite. If a count is not 0, every rank raises ValueError on CPUs; without
    ``vocab``, under torch.compile, and on GPUs, where reading the counts would synchronize, loss and gradient become NaN.
    """
    strange = part.new_zeros(()) if vocab is None else strange_labels(labels.labels, labels.ignored, vocab).sum()
    wrong = _wrong_weights(labels, reduction).sum()
    divisor = _count(labels.labels, labels.ignored) if labels.weights is None else labels.weights.sum()
    total = torch.stack([x.to(part.dtype) for x in (part.detach(), divisor, strange, wrong)])
    if ranks_of(ring) > 1:
        dist.all_reduce(total, group=ring)
    if each is not None:
        summed = [each.detach()] if labels.weights is None else [each.detach(), labels.weights]
        gathered = all_gather(tuple(summed), ring).wait() if ranks_of(ring) > 1 else summed
        total = torch.stack([*[order_free_sum(x.flatten()) for x in gathered], *total[len(summed) :]])
    if vocab is not None and part.device.type == "cpu" and eager_only([total]) and total[2:].any():
        raise _wrong(labels, ring, vocab, reduction)
    divisor = torch.ones_like(total[1]) if reduction == "sum" else total[1].masked_fill(total[1] == 0, torch.inf)
    divisor = divisor.masked_fill(total[2:].sum() > 0, torch.nan)  # so that gradients become NaN too
    none = total[1] == 0 if labels.weights is None or reduction == "mean" else torch.zeros_like(total[1], dtype=torch.bool)
    mine = (part / divisor).masked_fill(none, 0)  # no label, no gradient: not even NaN where the caller divides by 0 labels
    with torch.no_grad():
        mine.copy_(total[0] / divisor)  # the value has the same bits on all ranks, the gradient is this rank's
    return mine


def _wrong_weights(labels: Labels, reduction: str) -> Tensor:
    if labels.weights is None or reduction == "sum":
        return labels.labels.new_zeros((), dtype=torch.bool)
    return ~((labels.weights >= 0) & labels.weights.isfinite())


def _wrong(labels: Labels, ring: Group, vocab: int, reduction: str) -> ValueError:
    """Return the same error on every rank, which names an invalid label or weight. Every rank must call ``_wrong``."""
    strange = labels.labels[strange_labels(labels.labels, labels.ignored, vocab)][:1].tolist()
    wrong = [] if labels.weights is None else labels.weights[_wrong_weights(labels, reduction).expand_as(labels.weights)]
    mine = [strange, [str(float(x)) for x in wrong[:1]]]
    everybody = [mine] if ranks_of(ring) == 1 else exchange("the loss's labels", mine, ring)  # type: ignore[arg-type]
    rank = next(rank for rank, found in enumerate(everybody) if any(found))
    where, (label, weight) = "" if ranks_of(ring) == 1 else f"rank {rank}: ", everybody[rank]
    if label:
        return ValueError(
            f"{where}labels hold {label[0]}, and a vocabulary of {vocab} has 0 to {vocab - 1}: make the model with the vocab of "
            f"the tokenizer, and give tokens that shall not count the label {labels.ignored}, which is ignore_index"
        )
    return ValueError(
        f'{where}label_weights hold {weight[0]}, and the weights of reduction="mean" must be finite and at least 0, because it '
        'divides by their sum: pass reduction="sum" and divide by what you need'
    )


def count_labels(labels: Tensor, *, group: dist.ProcessGroup | DeviceMesh | None = None, ignore_index: int = -100) -> Tensor:
    """Return the number of all ranks' labels other than ``ignore_index``, as a 0-d tensor.

    :func:`loss` without weights divides by this number. ``labels``: int, any shape. ``group``: as in :func:`loss`. For gradient
    accumulation, let ``total`` be the sum of the counts of all microbatches, at least 1. Then backpropagate
    ``loss(..., reduction="sum") / total`` of each microbatch. Raise ValueError if labels are a DTensor or not a tensor.
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


def _check(ignore_index: Any, arrays: dict[str, Any]) -> None:
    """Raise ValueError if a value in ``arrays`` is a DTensor or not a tensor, or if ``ignore_index`` is not an integer."""
    for name, x in arrays.items():
        if is_dtensor(x):
            raise ValueError(
                f"{name} is a DTensor: pass this rank's shard of logits and labels, {name}.to_local(), and the whole head; FSDP2 "
                "has gathered model.head_weight once the model's forward has run, so read it after that"
            )
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {in_words(x)}")
    check_integer("ignore_index", ignore_index)


def _device(x: Any) -> str:
    return x.device.type if isinstance(x, Tensor) else "cpu"
