"""``sequence_parallel``: calls of a transformers model with global sequences, where each rank computes its shard.

A model that is compiled inside the ``with``, or by ``model.compile()``, is traced with its hooks. So ``before`` and ``after``
only find out if a call begins or ends. The compiler runs ``_begin`` and ``_end`` uncompiled, between its graphs. They look up the
hooks of the present ``with``, because graphs that an earlier one has traced are used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from ring_attn_core.data.settings import BALANCED
from ring_attn_core.kernels.backends import check_backend
from ring_attn_core.layouts import find_layout
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.strategies import Strategy

from ..ring.agreement import same_error
from ..ring.groups import ring_of
from ..training.gradients import means_of_rings
from .arguments import check_arguments, check_weights
from .attention import AccelerateHooks, Checkpointing, ring_configs, rotary_by_length, with_largest_position
from .cache import CachedCall, cached_call
from .loss import ChunkedHead, take_over, with_log_probs, with_loss
from .masks import NAME, CallRing, during, running
from .mixers import check_called, take_over_mixers
from .models import (
    MixingLayers,
    check_config,
    check_device,
    check_entry,
    check_launched,
    check_model,
    device_of,
    hugging_face_model,
)
from .shards import GlobalBatch, global_batch

T = TypeVar("T", nn.Module, PreTrainedConfig)

_rings: WeakKeyDictionary[PreTrainedModel, CallRing] = WeakKeyDictionary()  # set by ``enable``

SETTINGS = "ring_attention"
"""The attribute of a config that holds a ring's settings, as a dict that JSON can store."""

EAGER = "for fullgraph=True call torch.compile(model) before sequence_parallel, and pass its result to sequence_parallel"


@contextmanager
def sequence_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str | None = None,
    gather_logits: bool = False,
    loss_chunk: int | None = None,
    strategy: Strategy | None = None,
    order: str | None = None,
) -> Iterator[nn.Module]:
    """Make ``model(...)`` take global sequences, the same on every rank, and compute one shard per rank, inside this ``with``.

    ``model``: a model of transformers, also inside PEFT (LoRA), FSDP2, DDP or torch.compile. ``group``: the ring. ``layout``: a
    name; "balanced" assigns each call's documents or trees to ranks. ``strategy``, ``order``: as in :func:`ring_attention`. None:
    as set by ``enable``, else the default group, "zigzag", "auto" and "ring". The order is attention's alone.

    The call takes, by name:
        input_ids [batch, length] or inputs_embeds [batch, length, dim]. Any length: sequences are padded here if necessary.
        labels [batch, length], as transformers takes them: shifted here, before they are sharded, for models that predict the
            next token. If ``shift_labels`` are passed too, they replace labels and are not shifted.
        attention_mask [batch, length], 0 for padding, which may be anywhere.
        position_ids [1 or batch, length], [3, batch, length] of Qwen-VL, or [4, batch, length] with positions in the text first.
            None: 0, 1, 2, ... (rotary models only). A document begins where text positions restart and, without an
            attention_mask, where they skip, as in transformers. Documents do not see each other. One row may pass cu_seq_lens_q.
        visual_pos_masks [batch, length] and deepstack_visual_embeds, which Qwen3-VL takes with inputs_embeds: the mask of image
            tokens, and for each of the first layers a tensor [image tokens, dim] of their features.
        token_type_ids [batch, length]; for Gemma 3 they mark an image's tokens, which also see the image's later tokens.
        tree (parents, lengths), from :func:`pack_rollouts`: the prefix trees of the rows. It sets position_ids, and needs
            shift_labels in place of labels; ``label_weights`` [batch, length] are factors of these labels' losses.
        num_items_in_batch, the divisor of the loss in place of the number of labels.

    The call returns the model's output, with
        loss: the mean over all labels of all ranks, the same on every rank. Its backward gives each rank the gradients of its own
            tokens; :func:`sum_gradients` adds them over the ranks. DDP and FSDP compute the mean over their ranks instead, so
            multiply the loss by the number of those ranks. Divide a term of your own that every rank computes alike, such as a
            weight penalty, by the ring's number of ranks. With ``output_router_logits`` the loss includes ``aux_loss``.
        logits (or last_hidden_state of a model without them): this rank's shard in layout order, including the padding at the end
            of the sequence. With ``gather_logits``: the global tensor in natural order. Other hidden states are shards.

    ``loss_chunk``: a call with labels returns no logits, and computes its loss from logits of at most ``loss_chunk`` tokens of a
    rank at a time: ``loss(hidden, labels, head=weight, chunk=loss_chunk)``. The logits must be the output of a head without bias.

    ``model.generate(...)`` prefills the prompts over the ring, and stores their keys and values in a cache distributed over the
    ranks. All ranks then compute the same new tokens, so give them the same seed if they sample. In a loop of your own, under
    torch.no_grad(), pass ``use_cache=True`` to the first call, and the returned ``cache`` to each later call (``past_key_values``
    before transformers 5.24; either name is accepted). Such a call returns the logits of the last ``logits_to_keep`` tokens
    (default 1) of a prompt, which may be padded on the left. Calls without these arguments use no cache.

    Layers under activation checkpointing save attention's (out, lse), so that the ring's forward runs once. After
    ``activation_checkpointing_enable(offload=True)`` they save (out, lse) and the layers' inputs in host memory. Inside this
    ``with`` accelerate's hooks for context parallelism, which remove masks, are off. Attention's dropout is the same for any
    number of ranks. Other dropout uses each rank's own generator; seed the ranks differently. Leaving restores the model.

    Raise ValueError, the same on every rank, before anything is sent round the ring: if a model or an argument cannot be sharded,
    such as a head with one result per row; if a GPU backend is set for a model on a CPU; if torchrun started processes without a
    process group; if ranks differ in unsharded weights, ids or labels. A layer that mixes tokens without the ring raises later.
    """
    ring = ring_of_model(model, group, layout, strategy, order)
    check_launched()
    device = device_of(model)
    with same_error(ring.group):
        check_entry(model, ring, device)
    check_weights(model, ring)
    with on_shards(model, ring, gather_logits, loss_chunk):
        yield model


@contextmanager
def on_shards(
    model: nn.Module, ring: CallRing, gather_logits: bool = False, loss_chunk: int | None = None, averaged: bool = False
) -> Iterator[None]:
    """Enter ``sequence_parallel`` without its checks. ``averaged``: multiply gradients by the ranks, since DDP averages."""
    inside = hugging_face_model(model)
    take_over(inside)
    if inside in HOOKS:
        raise ValueError("sequence_parallel is on already for this model: enter it once, outside of the loop over batches")
    if gather_logits and loss_chunk is not None:
        raise ValueError("gather_logits=True asks for logits and loss_chunk for none: pass one of them")
    hooks = ModelHooks(inside, ring, gather_logits, loss_chunk, factor=ring.ranks if averaged else 1)
    with ExitStack() as stack:
        HOOKS[inside] = hooks
        means_of_rings.pop(inside, None)
        stack.callback(HOOKS.pop, inside, None)
        stack.enter_context(ring_configs(model))
        for mixer in take_over_mixers(inside):
            stack.callback(mixer.register_forward_pre_hook(check_called).remove)
        for module in rotary_by_length(inside):
            stack.enter_context(with_largest_position(module))
        stack.callback(hooks.checkpointing.restore)
        if ring.ranks > 1:
            hooks.mixing = MixingLayers(model, inside)
            stack.callback(hooks.mixing.forget)
        stack.callback(hooks.accelerate.restore)
        for called in {model, inside}:  # PEFT's generate calls the model inside
            stack.callback(called.register_forward_pre_hook(hooks.before, with_kwargs=True).remove)
            stack.callback(called.register_forward_hook(hooks.after, always_call=True).remove)
        yield


class ModelHooks:
    def __init__(self, model: PreTrainedModel, ring: CallRing, gather_logits: bool, loss_chunk: int | None, factor: int) -> None:
        self.model, self.ring, self.gather_logits, self.factor = model, ring, gather_logits, factor
        self.head = None if loss_chunk is None else ChunkedHead(model, loss_chunk)
        self.checkpointing, self.accelerate = Checkpointing(model), AccelerateHooks(model)
        self.mixing: MixingLayers | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHooks:
        raise ValueError("a model cannot be copied inside sequence_parallel: copy it before you enter, or after you leave")

    @contextmanager
    def gathering(self) -> Iterator[None]:
        before, self.gather_logits = self.gather_logits, True
        try:
            yield
        finally:
            self.gather_logits = before

    def before(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Return this rank's shards, or all tokens in some calls with a cache. Return None in a nested call: no change."""
        outer = running()
        if outer is not None and outer.model is self.model:
            return None
        return _begin(self.model, module is not self.model, args, kwargs)

    def after(self, module: nn.Module, args: tuple[object, ...], output: Any) -> Any:
        """End a call: return its output with the loss, and global logits if requested. ``output``: None if the call failed."""
        call = running()
        if call is None or call.model is not self.model or call.wrapped is (module is self.model):
            return None
        return _end(self.model, output)


HOOKS: WeakKeyDictionary[nn.Module, ModelHooks] = WeakKeyDictionary()


@torch.compiler.disable(reason=EAGER)
def _begin(model: PreTrainedModel, wrapped: bool, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
    if model not in HOOKS:
        return None
    hooks = HOOKS[model]
    arguments = check_arguments(model, hooks.ring, args, kwargs)
    call = global_batch(arguments) if arguments.cache is None else cached_call(arguments)
    call.model, call.wrapped = model, wrapped
    hooks.checkpointing.keep_attention()
    hooks.accelerate.remove()
    call.scope.enter_context(during(call))
    call.begin(model)
    if hooks.head and isinstance(call, GlobalBatch) and call.labels is not None and not (call.fused or hooks.gather_logits):
        call.scope.enter_context(hooks.head.summing(call, call.labels))
    return (), call.kwargs


@torch.compiler.disable(reason=EAGER)
def _end(model: PreTrainedModel, output: Any) -> Any:
    call, hooks = running(), HOOKS[model]
    assert call is not None
    call.scope.close()
    if output is None:
        return None
    if hooks.mixing is not None:
        hooks.mixing.end()
    if isinstance(call, CachedCall):
        return call.end()
    assert isinstance(call, GlobalBatch)
    fused = with_log_probs(output, call, hooks.factor) if call.fused else None
    return fused or with_loss(model, output, call, hooks.gather_logits, hooks.factor)


def enable(
    model_or_config: T,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    strategy: Strategy = "auto",
    backend: str = "auto",
    order: str = "ring",
) -> T:
    """Set a transformers model, or a config before its model is created, to ``attn_implementation="ring"``, and return it.

    ``layout``: as in :func:`sequence_parallel`. ``group``, ``strategy``, ``backend``, ``order``: as in :func:`ring_attention`. A
    config stores all but ``group`` for :func:`sequence_parallel`. A ``group`` for a config raises ValueError, because a group
    belongs to one process. Only text tokens are sharded: image and audio parts keep their own attention.

    Raise ValueError, with the reason, if a model cannot run over a ring: layers that are neither softmax attention nor a known
    mixer of a hybrid model, encoder-decoders, models with attention code of their own. Raise ValueError also if an option is
    unknown, or if a model's backend has no CPU kernels and the host has no GPU. The first call checks all other requirements.
    """
    _check_layout(layout)
    Options(strategy=strategy, backend=backend, order=order)
    check_backend(backend)
    if isinstance(model_or_config, PreTrainedConfig):
        check_config(model_or_config)
        if group is not None:
            raise ValueError("a config cannot keep group=...: pass it to enable(model, group) or sequence_parallel(model, group)")
        text = model_or_config.get_text_config()
        text._attn_implementation = NAME
        setattr(text, SETTINGS, {"layout": layout, "strategy": strategy, "backend": backend, "order": order})
        return model_or_config
    check_model(model_or_config)
    if not torch.cuda.is_available():  # else the model may still go to a GPU
        check_device(backend, device_of(model_or_config))
    model = hugging_face_model(model_or_config)
    _rings[model] = CallRing(ring_of(group), layout, strategy, backend, order)
    model.config.get_text_config()._attn_implementation = NAME
    return model_or_config


def ring_of_model(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None,
    layout: str | None,
    strategy: Strategy | None,
    order: str | None = None,
) -> CallRing:
    """Return the ring of ``enable``, or a ring of the default group. Arguments that are not None replace its own."""
    inside = hugging_face_model(model)
    settings = getattr(inside.config.get_text_config(), SETTINGS, None) or {}
    ring = _rings.get(inside, CallRing(ring_of(None), **settings))
    given: Any = {"group": None if group is None else ring_of(group), "layout": layout, "strategy": strategy, "order": order}
    ring = ring._replace(**{name: x for name, x in given.items() if x is not None})
    _check_layout(ring.layout)
    Options(strategy=ring.strategy, order=ring.order)
    return ring


def _check_layout(layout: str) -> None:
    if layout != BALANCED:
        find_layout(layout)
