"""The loss over the labels of all ranks, computed from each rank's logits or, with ``loss_chunk``, its hidden states.

After each call with labels ``with_loss`` computes the loss from this rank's logits and labels (shifted and sharded by
``shards.py``) and sums it over the ranks. The backward computes the gradients of this rank's tokens. With ``loss_chunk`` a
``ChunkedHead`` makes the model's head return the sum of cross-entropies in place of logits. The sum is computed from hidden
states, and logits of at most ``loss_chunk`` tokens exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ring_attn_core.model.chunks import check_chunk

from ..data.gather import gather
from ..ring.groups import is_dtensor
from ..training.cross_entropy import sum_of_hidden
from ..training.gradients import means_of_rings
from ..training.loss import labels_of, over_ranks
from ..training.loss import loss as loss_of
from .models import row_head_remedy
from .routers import with_routers
from .shards import GlobalBatch

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""The fields of trl's output that have one number per token."""


def with_loss(model: PreTrainedModel, output: Any, batch: GlobalBatch, gather_logits: bool, factor: int) -> Any:
    """Return the model's ``output`` with the loss over all ranks' labels, if any, and with global logits if ``gather_logits``.
    ``batch``: the running call. ``factor``: the backward multiplies the gradient of the loss by it."""
    fields = dict(output) if isinstance(output, ModelOutput) else None
    name = next((name for name in ("logits", "last_hidden_state") if fields and name in fields), None)
    result = fields[name] if fields is not None and name else output if isinstance(output, Tensor) else output[0]
    if batch.summed_vocab is None and result.shape[:2] != (batch.batch, len(batch.index)):
        what = f"the head of {type(model).__name__}, which returns {list(result.shape)},"
        raise ValueError(f"{what} {row_head_remedy(model)}")
    changed: dict[str, Tensor | None] = {}
    if batch.labels is not None:
        changed["loss"] = _loss(result, batch.labels, batch, factor)
    if fields is not None and fields.get("aux_loss") is not None:
        changed |= with_routers(model, fields["aux_loss"], changed.get("loss"), batch.ring.group, factor)
    if fields is not None and fields.get("pooler_output") is not None:
        changed["pooler_output"] = None  # it would be that of a shard's first token
    if batch.summed_vocab is not None:
        result = None
    elif gather_logits:
        result = gather(result, group=batch.ring.group, layout=batch.ring.layout, length=batch.length)
    if fields is None:
        return result if isinstance(output, Tensor) else (*changed.values(), result, *output[1:])
    return type(output)(**{**fields, **changed, **({name: result} if name else {})})


def _loss(result: Tensor, labels: Tensor, batch: GlobalBatch, factor: int) -> Tensor:
    """Return the mean loss of all ranks' labels, or the sum over ``num_items_in_batch``. A mean divides by the sum of label
    weights. ``result``: this rank's logits, or the summed loss of its labels from a ChunkedHead."""
    group, ignored, reduction = batch.ring.group, batch.ignore_index, "mean" if batch.divisor is None else "sum"
    if batch.summed_vocab is not None:
        tokens = labels_of(labels, ignored, 1, batch.label_weights, result.dtype)
        total = over_ranks(result.reshape(()), tokens, group, reduction, batch.summed_vocab)
    else:
        weights: dict[str, Any] = {"label_weights": batch.label_weights}
        total = loss_of(result, labels, **weights, reduction=reduction, group=group, ignore_index=ignored)
    return _divided(total, batch, factor)


def _divided(total: Tensor, batch: GlobalBatch, factor: int) -> Tensor:
    """Divide the loss by ``num_items_in_batch``, if passed; its backward multiplies the gradient by ``factor``. If the caller has
    not scaled a ring's mean, its backward notes the ring in ``means_of_rings``, for :func:`sum_gradients`."""
    model, group, divisor = batch.model, batch.ring.group, batch.divisor
    if divisor is not None:
        total = total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)
    if total.requires_grad and model is not None and dist.is_initialized() and batch.ring.ranks < dist.get_world_size():
        ranks = {dist.get_rank()} if group is None else set(dist.get_process_group_ranks(group))

        def note(gradient: Tensor) -> None:
            means_of_rings.pop(model, None)
            if divisor is None and gradient.item() == 1:
                means_of_rings[model] = ranks

        total.register_hook(note)
    if factor > 1 and total.requires_grad:
        total.register_hook(lambda gradient: gradient * factor)
    return total


def with_log_probs(output: Any, batch: GlobalBatch, factor: int) -> Any:
    """Return the output of trl's head with the loss over all ranks' labels, and each ``PER_TOKEN`` field gathered in natural
    order. It has ``length - 1`` tokens with labels, ``length`` with shift_labels. Gradients of gathered fields sum over ranks to
    the gradient on one device times the number of ranks."""
    assert batch.labels is not None
    ring, end = batch.ring, batch.length - 1 if batch.shifted else batch.length
    wide = lambda x: gather(x, group=ring.group, layout=ring.layout, length=batch.length)[:, :end]
    fields = {name: x if x is None or name not in PER_TOKEN else wide(x) for name, x in vars(output).items()}
    labels = labels_of(batch.labels, batch.ignore_index, 1, None, output.log_probs.dtype)
    total = over_ranks(-output.log_probs.sum(), labels, ring.group, "mean" if batch.divisor is None else "sum")
    return type(output)(**{**fields, "loss": _divided(total, batch, factor)})


class ChunkedHead:
    """The language-model head of ``model``, which inside ``summing`` returns this rank's summed cross-entropy in place of logits.
    ``chunk``: the maximum number of tokens whose logits exist at a time."""

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        check_chunk("loss_chunk", chunk)
        self.model, self.chunk, name = model, chunk, type(model).__name__
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or tuple(head.weight.shape) != (head.out_features, head.in_features):
            kind = type(head)
            adapter = kind.__module__.startswith("peft.")
            raise ValueError(
                f"loss_chunk computes logits from hidden states and the matrix of the model's head, and the head of {name} is "
                f"{kind.__name__} of {'PEFT, with an adapter of its own' if adapter else kind.__module__}: leave loss_chunk out"
                f"{', or the head out of target_modules and modules_to_save' if adapter else ''}"
            )
        if head.bias is not None:
            raise ValueError(f"loss_chunk knows heads that are a matrix alone, and that of {name} has a bias: leave it out")
        self.linear = head

    @contextmanager
    def summing(self, batch: GlobalBatch, labels: Tensor) -> Iterator[None]:
        """Make the head return the summed loss of ``labels`` as a tensor [1, 1, 1], inside this ``with``."""
        made: list[Tensor] = []
        batch.summed_vocab = self.linear.out_features

        def forward(hidden: Tensor) -> Tensor:
            if hidden.shape[:-1].numel() != labels.numel():
                raise ValueError(
                    f"{type(self.model).__name__} computes logits of {hidden.shape[:-1].numel()} of {labels.numel()} tokens, "
                    "so loss_chunk cannot compute their loss: leave it out"
                )
            if is_dtensor(self.linear.weight):
                raise ValueError(
                    "the head's weight is a DTensor in the middle of the forward: loss_chunk takes heads that FSDP2 has gathered "
                    "by then, and no tensor parallel ones; leave it out"
                )
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            tokens = labels_of(labels, batch.ignore_index, self.chunk, batch.label_weights, dtype)
            made.append(sum_of_hidden(hidden.flatten(0, -2), self.linear.weight, tokens).view(1, 1, 1))
            return made[-1]

        def check(_: nn.Module, __: Any, output: Any) -> None:
            logits = output["logits"] if isinstance(output, dict) else output[0]
            if not made or logits is not made[-1]:
                raise ValueError(
                    f"{type(self.model).__name__} computes something of its logits after its head, as a softcap or a scale: "
                    "leave loss_chunk out, which never has them whole"
                )

        before = self.linear.__dict__.get("forward")
        self.linear.forward = forward  # type: ignore[method-assign]
        handle = self.model.register_forward_hook(check, prepend=True)
        try:
            yield
        finally:
            handle.remove()
            del self.linear.forward
            if before is not None:
                self.linear.forward = before
