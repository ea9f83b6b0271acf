"""A model's head that returns the loss of hidden states in place of their logits, computed a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ring_attn_core.model.chunks import check_chunk

from ..ring.groups import is_dtensor
from ..training.cross_entropy import Labels, sum_of_hidden


class Head:
    """The head of ``model``, which inside ``summing`` returns a rank's sum of cross-entropies in place of logits.

    Raise ValueError, with the reason, if the head is not a matrix without a bias.
    """

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        check_chunk("loss_chunk", chunk)
        self.model, self.chunk, name = model, chunk, type(model).__name__
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or tuple(head.weight.shape) != (head.out_features, head.in_features):
            raise ValueError(
                f"loss_chunk computes logits from hidden states and the matrix of the model's head, and the head of {name} is "
                f"{type(head).__name__}: leave loss_chunk out"
            )
        if head.bias is not None:
            raise ValueError(f"loss_chunk knows heads that are a matrix alone, and that of {name} has a bias: leave it out")
        self.linear = head

    @contextmanager
    def summing(self, labels: Tensor, ignore_index: int) -> Iterator[None]:
        """Make the head return the sum over ``labels`` as [1, 1, 1] inside this ``with``; the model must return it unchanged."""
        made: list[Tensor] = []
        tokens = Labels(labels.flatten(), ignore_index, self.chunk)

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
