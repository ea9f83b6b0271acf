"""A model of transformers on whole sequences, of which every rank computes its shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ..data.gather import gather
from ..layers.recompute import recomputed
from ..training.loss import loss as loss_of
from .inputs import Shards, sharded
from .masks import current, during
from .models import check_model, hugging_face_model, rotary_by_length
from .settings import attending, ring_of_model
from .whole import Ring

_inside: WeakSet[nn.Module] = WeakSet()
FUNCTION = "_gradient_checkpointing_func"
"""Where transformers keeps how a layer computes its forward again."""


@contextmanager
def sequence_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str | None = None,
    gather_logits: bool = False,
) -> Iterator[nn.Module]:
    """Inside this ``with``, ``model(...)`` takes whole sequences, the same on every rank, and each rank computes a shard of them.

    ``model``: a model of transformers, or one that PEFT (LoRA), FSDP2, DDP or torch.compile hold. ``group``: the ring;
    ``layout``: which tokens a rank holds; None: what ``enable`` was told, else the default group and "zigzag".

    The call takes, by name:
        input_ids [batch, length] or inputs_embeds [batch, length, dim]. Any length: what does not divide is padded here.
        labels [batch, length], as transformers takes them: shifted here, before they are sharded, for models that predict the
            next token. Or ``shift_labels`` beside them, shifted already.
        attention_mask [batch, length], 0 for padding, anywhere.
        position_ids [1 or batch, length], [3, batch, length] of Qwen-VL, or [4, batch, length] with positions in the text first.
            None: 0, 1, 2, ... Where they begin again a new document does, which sees nothing of the others; without an
            attention_mask every jump is such a place, as for transformers. Or cu_seq_lens_q, for a batch of one row.
        token_type_ids [batch, length]; of Gemma 3 they say which tokens are of an image, which see all of their image.
        num_items_in_batch, what the loss is divided by in place of the number of labels.

    Returns what the model returns, with
        loss: the mean over all labels of all ranks, the same on every rank; its gradient is this rank's part. The *sum* over the
            ranks is one device's (:func:`sum_gradients`); DDP and FSDP take the mean, so multiply the loss by their ranks.
        logits (of a model without them last_hidden_state): this rank's shard in layout order, with what pads it at the end of the
            sequence; or with ``gather_logits`` whole, in natural order. Hidden states are shards.

    The cache is off. Layers under gradient checkpointing keep attention's (out, lse), so that the ring runs once. Attention's
    dropout is the same for any number of ranks; other dropout draws from each rank's own generator, which should differ.
    Leaving restores the model: its attention, hooks and checkpointing.

    Raises ValueError, the same on every rank and before anything is sent round the ring, for models and arguments that cannot be
    split, by name, and for batches that the ranks do not share, which are compared at every call.
    """
    inside = hugging_face_model(model)
    check_model(model)
    if inside in _inside:
        raise ValueError("sequence_parallel is on already for this model: enter it once, outside of the loop over batches")
    ring = ring_of_model(inside, group, layout)
    with ExitStack() as stack:
        _inside.add(inside)
        stack.callback(_inside.discard, inside)
        stack.enter_context(attending(inside))
        for module in rotary_by_length(inside):
            stack.enter_context(_told_the_longest(module))
        calls = _Calls(inside, ring, gather_logits)
        stack.callback(calls.checkpointing.restore)
        for handle in (
            model.register_forward_pre_hook(calls.enter, with_kwargs=True),
            model.register_forward_hook(calls.leave, always_call=True),
        ):
            stack.callback(handle.remove)
        yield model


class _Call(NamedTuple):
    """A call that the model is in the middle of."""

    shards: Shards
    scope: ExitStack


class _Calls:
    """What happens before and after each call of a model."""

    def __init__(self, model: PreTrainedModel, ring: Ring, gather_logits: bool) -> None:
        self.model, self.ring, self.gather_logits = model, ring, gather_logits
        self.open: list[_Call] = []
        self.checkpointing = _Checkpointing(model)

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Shard the arguments."""
        shards = sharded(self.model, self.ring, args, kwargs)
        self.checkpointing.keep_attention()
        scope = ExitStack()
        scope.enter_context(during(shards.whole))
        self.open.append(_Call(shards, scope))
        return (), shards.kwargs

    def leave(self, module: nn.Module, args: tuple[object, ...], output: Any) -> Any:
        """Add the loss, and gather where that is wanted; without an output, after an error, only end the call."""
        if not self.open:
            return None
        shards, scope = self.open.pop()
        scope.close()
        if output is None:
            return None
        fields = dict(output) if isinstance(output, ModelOutput) else None
        name = next((name for name in ("logits", "last_hidden_state") if fields and name in fields), None)
        result = fields[name] if fields is not None and name else output if isinstance(output, Tensor) else output[0]
        added = {}
        if shards.labels is not None:
            added["loss"] = self._loss(result, shards.labels, shards)
        if self.gather_logits:
            result = gather(result, group=self.ring.group, layout=self.ring.layout, length=shards.whole.length)
        if fields is None:
            return result if isinstance(output, Tensor) else (*added.values(), result, *output[1:])
        return type(output)(**{**fields, **added, **({name: result} if name else {})})

    def _loss(self, logits: Tensor, labels: Tensor, shards: Shards) -> Tensor:
        """The mean over the labels of all ranks, or their sum over ``num_items_in_batch``."""
        count = shards.count
        how = {"group": self.ring.group, "ignore_index": shards.ignore_index}
        if count is None:
            return loss_of(logits, labels, **how)
        total = loss_of(logits, labels, reduction="sum", **how)
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)


class _Checkpointing:
    """The layers of a model that can compute their forward again, and how they did before ``keep_attention``."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.before: list[tuple[nn.Module, Any]] = []

    def keep_attention(self) -> None:
        """Let them keep attention's (out, lse). Called before each call, since a Trainer sets checkpointing on its own time."""
        for layer in self.layers:
            function = layer.__dict__.get(FUNCTION, recomputed)
            if function is not recomputed:
                self.before.append((layer, function))
                setattr(layer, FUNCTION, recomputed)

    def restore(self) -> None:
        """Let them do as they were told last."""
        for layer, function in self.before:
            setattr(layer, FUNCTION, function)


@contextmanager
def _told_the_longest(rotary: nn.Module) -> Iterator[None]:
    """Inside this ``with`` a rotary embedding whose angles depend on the largest position is shown that of the whole sequence.

    It comes as one more token, whose angles are cut off again.
    """

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        whole = current()
        if whole is None or whole.longest is None:
            return None
        given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        more = torch.cat([given, whole.longest.to(given.dtype).expand(*given.shape[:-1], 1)], -1)
        return (args[0], more, *args[2:]) if len(args) > 1 else args, kwargs | ({} if len(args) > 1 else {"position_ids": more})

    def after(_: nn.Module, args: tuple[Any, ...], angles: Any) -> Any:
        if current() is None:
            return None
        return angles[..., :-1, :] if isinstance(angles, Tensor) else tuple(x[..., :-1, :] for x in angles)

    handles = rotary.register_forward_pre_hook(before, with_kwargs=True), rotary.register_forward_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
