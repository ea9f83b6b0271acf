"""Calls of a transformers model with global sequences, of which every rank computes its shard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ..data.gather import gather
from ..ring.agreement import same_error, tell
from ..ring.groups import is_dtensor
from ..training.loss import loss as loss_of
from ..training.loss import over_ranks
from .accelerate_hooks import AccelerateHooks
from .cached_call import CachedCall
from .checkpointing import Checkpointing
from .configs import attending
from .deepstack import added
from .global_batch import ModelRing
from .head import Head
from .inputs import Shards, sharded
from .masks import during
from .mixing import MixingLayers
from .models import answers_once, check_head, check_model, hugging_face_model
from .rotary import rotary_by_length, told_the_longest
from .settings import check_backend, device_of, ring_of_model

_inside: WeakKeyDictionary[nn.Module, ModelCalls] = WeakKeyDictionary()


@contextmanager
def sequence_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str | None = None,
    gather_logits: bool = False,
    loss_chunk: int | None = None,
) -> Iterator[nn.Module]:
    """Make ``model(...)`` take global sequences, the same on every rank, and compute one shard per rank, inside this ``with``.

    ``model``: a model of transformers, or one inside PEFT (LoRA), FSDP2, DDP or torch.compile. ``group``: the ring; ``layout``:
    the distribution of tokens over ranks; None: the settings of ``enable``, else the default group and "zigzag".

    The call takes, by name:
        input_ids [batch, length] or inputs_embeds [batch, length, dim]. Any length: sequences are padded here if necessary.
        labels [batch, length], as transformers takes them: shifted here, before they are sharded, for models that predict the
            next token. Or ``shift_labels`` beside them, shifted already.
        attention_mask [batch, length], 0 for padding, anywhere.
        position_ids [1 or batch, length], [3, batch, length] of Qwen-VL, or [4, batch, length] with positions in the text first.
            None: 0, 1, 2, ... A restart begins a new document, which sees none of the others; without an attention_mask every
            jump does, as in transformers. Or cu_seq_lens_q, for a batch of one row.
        visual_pos_masks [batch, length] and deepstack_visual_embeds beside inputs_embeds, of Qwen3-VL: the mask of image tokens,
            and [tokens of images, dim] for each of the first layers.
        token_type_ids [batch, length]; for Gemma 3 they mark the tokens of an image, which see their whole image.
        num_items_in_batch, the divisor of the loss in place of the number of labels.

    The call returns the model's output, with
        loss: the mean over all labels of all ranks, the same on every rank; its gradient is this rank's part. The *sum* over the
            ranks is one device's (:func:`sum_gradients`); DDP and FSDP take the mean, so multiply the loss by their ranks. Divide
            a term of your own that every rank computes alike, such as a penalty on weights, by the ranks of the ring.
        logits (or last_hidden_state of a model without them): this rank's shard in layout order, including the padding at the end
            of the sequence; with ``gather_logits`` global, in natural order. Hidden states are shards.

    ``loss_chunk``: a call with labels returns no logits, and computes its loss from the logits of at most so many tokens of a
    rank at a time, as ``loss(hidden, labels, head=weight, chunk=loss_chunk)`` does: [tokens, vocab] never exists. It requires a
    model whose logits are its head's, and whose head is a matrix without a bias.

    ``model.generate(...)`` prefills the prompts over the ring, and stores their keys and values in a cache distributed over the
    ranks; then all ranks compute the same new tokens, so seed them alike if tokens are drawn. A loop of your own does the same
    with ``use_cache=True`` and the returned ``cache`` (``past_key_values`` before transformers 5.24; either name is accepted),
    under torch.no_grad(). Such a call returns the logits of the last ``logits_to_keep`` tokens (1) of a prompt, which may be
    padded on the left. In other calls the cache is off.

    Layers under activation checkpointing save attention's (out, lse), so that the ring runs once; after
    ``activation_checkpointing_enable(offload=True)`` in host memory, with their inputs. accelerate's hooks for context
    parallelism, which remove masks, are removed meanwhile. Attention's dropout is the same for any number of ranks; other dropout
    draws from each rank's own generator, which should differ. Leaving restores the model: its attention, hooks, head and
    checkpointing.

    Raise ValueError, the same on every rank and before anything is sent round the ring, if a model or an argument, which it
    names, cannot be split, such as a head with one result per row; a GPU backend is set for a model on a CPU; torchrun has
    started several processes without a process group; ranks hold different weights; or ranks pass different batches (compared at
    every call).
    """
    ring = ring_of_model(hugging_face_model(model), group, layout)
    _check_launched()
    device = device_of(model)
    with same_error(ring.group):
        check_entry(model, ring, device)
    _check_weights(model, ring)
    with on_shards(model, ring, gather_logits, loss_chunk):
        yield model


@contextmanager
def on_shards(
    model: nn.Module, ring: ModelRing, gather_logits: bool = False, loss_chunk: int | None = None, averaged: bool = False
) -> Iterator[None]:
    """Enter ``sequence_parallel`` for a model whose weights are, or will be, the same on every rank.

    ``averaged``: multiply the gradient of each loss by the ranks of the ring, for DDP or FSDP, which average gradients.
    """
    inside = hugging_face_model(model)
    if inside in _inside:
        raise ValueError("sequence_parallel is on already for this model: enter it once, outside of the loop over batches")
    if gather_logits and loss_chunk is not None:
        raise ValueError("gather_logits=True asks for logits and loss_chunk for none: pass one of them")
    calls = ModelCalls(inside, ring, gather_logits, loss_chunk)
    calls.factor = ring.ranks if averaged else 1
    with ExitStack() as stack:
        _inside[inside] = calls
        stack.callback(_inside.pop, inside, None)
        stack.enter_context(attending(model))
        for module in rotary_by_length(inside):
            stack.enter_context(told_the_longest(module))
        stack.callback(calls.checkpointing.restore)
        if ring.ranks > 1:
            calls.mixing = MixingLayers(model, inside)
            stack.callback(calls.mixing.forget)
        stack.callback(calls.accelerates.restore)
        for called in calls.called(model):
            stack.callback(called.register_forward_pre_hook(calls.enter, with_kwargs=True).remove)
            stack.callback(called.register_forward_hook(calls.leave, always_call=True).remove)
        yield


def check_entry(model: nn.Module, ring: ModelRing, device: str) -> None:
    """Raise ValueError if a ring does not support the model or its head, or if ``ring.backend`` does not run on ``device``."""
    check_model(model)
    check_head(model)
    check_backend(ring.backend, device)


def _check_launched() -> None:
    """Raise ValueError if torchrun started processes without a process group: each would train on all tokens by itself."""
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    from torch.distributed.elastic.utils.api import get_env_variable_or_raise

    ranks = int(get_env_variable_or_raise("WORLD_SIZE"))
    if ranks > 1:
        raise ValueError(
            f"torchrun has started {ranks} processes, and this one is connected with no other, so each would compute "
            'the whole sequence by itself: call torch.distributed.init_process_group("nccl") first, on CPUs with "gloo"'
        )


def _check_weights(model: nn.Module, ring: ModelRing) -> None:
    """Raise ValueError if ranks hold different weights, by the sums of their bytes; sharded weights are not compared."""
    whole = {name: p.detach() for name, p in model.named_parameters() if not (is_dtensor(p) or p.is_meta)}
    if ring.ranks == 1 or not whole:
        return
    of_bytes = [p.reshape(-1).view(torch.uint8).sum(dtype=torch.int64) for p in whole.values()]
    mine = dict(zip(whole, torch.stack([x.to(of_bytes[0].device) for x in of_bytes]).tolist(), strict=True))
    told = tell("sequence_parallel", mine, ring.group)  # type: ignore[arg-type]
    for rank, theirs in enumerate(told):
        other = next((name for name in {**told[0], **theirs} if told[0].get(name) != theirs.get(name)), None)
        if other is not None:
            raise ValueError(
                f"rank {rank} of the ring holds another {other} than rank 0: load the same weights on every rank, or call "
                "torch.manual_seed with one seed before the model, and adapters as LoRA, are made"
            )


def calls_of(model: nn.Module) -> ModelCalls:
    """Return the hooks around the calls of ``model``, which must be inside sequence_parallel."""
    return _inside[hugging_face_model(model)]


class _ModelCall(NamedTuple):
    """A call of ``module`` in progress; if ``summed``, its head returns the sum of the losses in place of logits."""

    module: nn.Module
    shards: Shards
    scope: ExitStack
    summed: bool


class _OpenCalls(threading.local):
    """A stack per thread: the calls of a model that have begun and not yet returned."""

    def __init__(self) -> None:
        self.calls: list[_ModelCall] = []


class ModelCalls:
    """The hooks that run before and after each call of a model."""

    def __init__(self, model: PreTrainedModel, ring: ModelRing, gather_logits: bool, loss_chunk: int | None) -> None:
        self.model, self.ring, self.gather_logits = model, ring, gather_logits
        self.head = None if loss_chunk is None else Head(model, loss_chunk)
        self.factor = 1
        """The factor of the loss's gradient."""
        self._of_threads = _OpenCalls()
        self.checkpointing = Checkpointing(model)
        self.accelerates = AccelerateHooks(model)
        self.mixing: MixingLayers | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelCalls:
        """Raise ValueError: the hooks of a copied model would be those of the original."""
        raise ValueError("a model cannot be copied inside sequence_parallel: copy it before you enter, or after you leave")

    @property
    def open(self) -> list[_ModelCall]:
        """Return the calls in progress in this thread."""
        return self._of_threads.calls

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Return global logits inside this ``with``."""
        before, self.gather_logits = self.gather_logits, True
        try:
            yield
        finally:
            self.gather_logits = before

    def called(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that are called: ``model`` and, if not compiled, the model inside, which PEFT's generate calls."""
        return [model] if self.model is model or isinstance(model, OptimizedModule) else [model, self.model]

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Shard the arguments, unless an enclosing call has done so."""
        if self.open:
            return None
        shards = sharded(self.model, self.ring, args, kwargs)
        self.checkpointing.keep_attention()
        self.accelerates.take_off()
        scope = ExitStack()
        scope.enter_context(during(shards.whole))
        if shards.features is not None:
            scope.enter_context(added(self.model, shards.features))
        summed = False
        if self.head is not None and shards.labels is not None and not self.gather_logits:
            scope.enter_context(self.head.summing(shards.labels, shards.ignore_index))
            summed = True
        if isinstance(shards.whole, CachedCall):
            shards.whole.enter(self.model, scope)
        self.open.append(_ModelCall(module, shards, scope, summed))
        return (), shards.kwargs

    def leave(self, module: nn.Module, args: tuple[object, ...], output: Any) -> Any:
        """Add the loss, and gather logits if requested; if the call failed and has no output, only end it."""
        if not self.open or self.open[-1].module is not module:
            return None
        _, shards, scope, summed = self.open.pop()
        scope.close()
        if self.mixing is not None and output is not None:
            self.mixing.end()
        if isinstance(shards.whole, CachedCall) and output is not None:
            shards.whole.end()
        if output is None or isinstance(shards.whole, CachedCall):
            return None
        fields = dict(output) if isinstance(output, ModelOutput) else None
        name = next((name for name in ("logits", "last_hidden_state") if fields and name in fields), None)
        result = fields[name] if fields is not None and name else output if isinstance(output, Tensor) else output[0]
        if not summed and result.shape[:2] != (shards.whole.batch, len(shards.whole.index)):
            what = f"the head of {type(self.model).__name__}, which returns {list(result.shape)},"
            raise ValueError(f"{what} {answers_once(self.model)}")
        changed: dict[str, Tensor | None] = {}
        if shards.labels is not None:
            changed["loss"] = self._loss(result, shards.labels, shards, summed)
        if fields is not None and fields.get("pooler_output") is not None:
            changed["pooler_output"] = None  # it would be that of a shard's first token
        if summed:
            result = None
        elif self.gather_logits:
            result = gather(result, group=self.ring.group, layout=self.ring.layout, length=shards.whole.length)
        if fields is None:
            return result if isinstance(output, Tensor) else (*changed.values(), result, *output[1:])
        return type(output)(**{**fields, **changed, **({name: result} if name else {})})

    def _loss(self, result: Tensor, labels: Tensor, shards: Shards, summed: bool) -> Tensor:
        """Return the mean loss over all ranks' labels, or their summed loss divided by ``num_items_in_batch`` if it was passed.

        ``result``: this rank's logits, or, if ``summed``, the sum of the losses of its labels, as its head returned it.
        """
        count = shards.count
        reduction = "mean" if count is None else "sum"
        if summed:
            total = over_ranks(result.reshape(()), labels, self.ring.group, shards.ignore_index, reduction)
        else:
            total = loss_of(result, labels, reduction=reduction, group=self.ring.group, ignore_index=shards.ignore_index)
        total = total if count is None else total / (count.to(total.device) if isinstance(count, Tensor) else count)
        if self.factor > 1 and total.requires_grad:
            total.register_hook(lambda gradient: gradient * self.factor)
        return total
