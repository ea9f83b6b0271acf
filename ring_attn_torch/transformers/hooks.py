"""The hooks that run before and after each call of a model inside ``sequence_parallel``.

A model that is compiled inside the ``with``, or by ``model.compile()``, is traced with its hooks. So ``before`` and ``after``
only find out if a call begins or ends. The compiler runs ``_begin`` and ``_end`` uncompiled, between its graphs. They look up the
hooks of the present ``with``, because graphs of an earlier one are used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from .attention import Checkpointing
from .cache import CachedCall
from .loss import ChunkedHead, with_log_probs, with_loss
from .masks import AccelerateHooks, CallRing, during, running
from .models import MixingLayers, hugging_face_model
from .shards import GlobalBatch, sharded

EAGER = "for fullgraph=True call torch.compile(model) before sequence_parallel, and pass its result to sequence_parallel"


class ModelHooks:
    """The hooks that run before and after each call of a model."""

    def __init__(self, model: PreTrainedModel, ring: CallRing, gather_logits: bool, loss_chunk: int | None, factor: int) -> None:
        self.model, self.ring, self.gather_logits, self.factor = model, ring, gather_logits, factor
        self.head = None if loss_chunk is None else ChunkedHead(model, loss_chunk)
        self.checkpointing, self.accelerate = Checkpointing(model), AccelerateHooks(model)
        self.mixing: MixingLayers | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHooks:
        """Raise ValueError: the hooks of a copied model would act on the original."""
        raise ValueError("a model cannot be copied inside sequence_parallel: copy it before you enter, or after you leave")

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Make calls return global logits inside this ``with``."""
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
"""The hooks of each model that is inside ``sequence_parallel``."""


@torch.compiler.disable(reason=EAGER)
def _begin(model: PreTrainedModel, wrapped: bool, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
    if model not in HOOKS:
        return None
    hooks = HOOKS[model]
    call = sharded(model, hooks.ring, args, kwargs)
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


def hooks_of(model: nn.Module) -> ModelHooks:
    """Return the call hooks of ``model``, which must be inside sequence_parallel."""
    return HOOKS[hugging_face_model(model)]
