"""``sequence_parallel``: calls of a transformers model with global sequences, where each rank computes its shard.

Entering registers hooks; leaving restores the model's attention, hooks, head and checkpointing. A call goes through four files:

    hooks.py       ``ModelHooks.before`` takes the global arguments, and ``ModelHooks.after`` returns the output
    shards.py      ``sharded`` checks the arguments and takes this rank's tokens; the model then runs on these
    attention.py   ``ring_attention_forward`` computes each layer's attention over the ring, with a mask of masks.py
    loss.py        ``with_loss`` computes the loss from this rank's logits and sums over the ranks

``enable`` stores the ring of later ``sequence_parallel`` calls. A group or layout passed to such a call replaces the stored one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from ring_attn_core.problem.options import Options
from ring_attn_core.problem.strategies import Strategy

from ..ring.agreement import same_error
from ..ring.groups import group_name, group_of
from ..training.gradients import means_of_rings
from .arguments import check_weights
from .attention import ring_configs
from .balanced import check_layout_name
from .hooks import HOOKS, ModelHooks
from .masks import NAME, CallRing
from .models import (
    MixingLayers,
    check_backend,
    check_backend_name,
    check_config,
    check_head,
    check_model,
    device_of,
    hugging_face_model,
    text_config,
)
from .routers import take_over
from .shards import rotary_by_length, with_largest_position

T = TypeVar("T", nn.Module, PreTrainedConfig)

_rings: WeakKeyDictionary[PreTrainedModel, CallRing] = WeakKeyDictionary()  # set by ``enable``

SETTINGS = "ring_attention"
"""The attribute of a config that holds a ring's settings, as a dict that JSON can store."""


@contextmanager
def sequence_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str | None = None,
    gather_logits: bool = False,
    loss_chunk: int | None = None,
    strategy: Strategy | None = None,
) -> Iterator[nn.Module]:
    """Make ``model(...)`` take global sequences, the same on every rank, and compute one shard per rank, inside this ``with``.

    ``model``: a model of transformers, also inside PEFT (LoRA), FSDP2, DDP or torch.compile. ``group``: the ring. ``layout``: a
    name; "balanced" assigns each call's documents or trees to ranks. ``strategy``: as in :func:`ring_attention`. None: as set by
    ``enable``, else the default group, "zigzag" and "auto".

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
    ring = ring_of_model(hugging_face_model(model), group, layout, strategy)
    _check_launched()
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
    """Enter ``sequence_parallel`` without checking the model or comparing the ranks' weights: the caller has done both.
    ``averaged``: multiply each loss's gradient by the number of ranks, for DDP or FSDP, which average gradients."""
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


def enable(
    model_or_config: T,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    strategy: Strategy = "auto",
    backend: str = "auto",
) -> T:
    """Set a transformers model, or a config before its model is created, to ``attn_implementation="ring"``, and return it.

    ``layout``: as in :func:`sequence_parallel`. ``group``, ``strategy``, ``backend``: as in :func:`ring_attention`. A config
    stores ``layout``, ``strategy`` and ``backend`` for :func:`sequence_parallel`. A ``group`` for a config raises ValueError,
    because a group belongs to one process. Only text tokens are sharded: image and audio parts keep their own attention.

    Raise ValueError, with the reason, if a model cannot run over a ring: layers other than softmax attention (Mamba, linear
    attention, convolutions), encoder-decoders, models with attention code of their own. Raise ValueError also if an option is
    unknown, or if a model's backend has no CPU kernels and the host has no GPU. The first call checks all other requirements.
    """
    check_layout_name(layout)
    Options(strategy=strategy, backend=backend)
    check_backend_name(backend)
    if isinstance(model_or_config, PreTrainedConfig):
        check_config(model_or_config)
        if group is not None:
            raise ValueError("a config cannot keep group=...: pass it to enable(model, group) or sequence_parallel(model, group)")
        text = text_config(model_or_config)
        text._attn_implementation = NAME
        setattr(text, SETTINGS, {"layout": layout, "strategy": strategy, "backend": backend})
        return model_or_config
    check_model(model_or_config)
    if not torch.cuda.is_available():  # else the model may still go to a GPU
        check_backend(backend, device_of(model_or_config))
    model = hugging_face_model(model_or_config)
    _rings[model] = CallRing(group_of(group_name(group)), layout, strategy, backend)
    text_config(model.config)._attn_implementation = NAME
    return model_or_config


def ring_of_model(
    model: PreTrainedModel,
    group: dist.ProcessGroup | DeviceMesh | None,
    layout: str | None,
    strategy: Strategy | None,
) -> CallRing:
    """Return the ring of ``enable``, or a ring of the default group. Arguments that are not None replace its own."""
    settings = getattr(text_config(model.config), SETTINGS, None) or {}
    ring = _rings.get(model, CallRing(group_of(group_name(None)), **settings))
    if group is not None:
        ring = ring._replace(group=group_of(group_name(group)))
    if layout is not None:
        check_layout_name(layout)
        ring = ring._replace(layout=layout)
    if strategy is not None:
        ring = ring._replace(strategy=Options(strategy=strategy).strategy)
    return ring


def check_entry(model: nn.Module, ring: CallRing, device: str) -> None:
    """Raise ValueError if a ring does not support the model or its head, or if ``ring.backend`` does not run on ``device``."""
    check_model(model)
    check_head(model)
    check_backend(ring.backend, device)


def _check_launched() -> None:
    """Raise ValueError if torchrun started processes without a process group: each process would train alone on all tokens."""
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    from torch.distributed.elastic.utils.api import get_env_variable_or_raise

    ranks = int(get_env_variable_or_raise("WORLD_SIZE"))
    if ranks > 1:
        raise ValueError(
            f"torchrun has started {ranks} processes, and this one is connected with no other, so each would compute "
            'the whole sequence by itself: call torch.distributed.init_process_group("nccl") first, on CPUs with "gloo"'
        )
