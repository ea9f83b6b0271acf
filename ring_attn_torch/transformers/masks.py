"""The mask function ``ring_mask`` for transformers, and the running call with its documents and padding.

A model describes its mask as a function of positions, and ``mask_functions.py`` recognizes its pattern. ``ring_mask`` returns a
band and at most one interval of keys per query, but no array of tokens by tokens.

accelerate's hooks for context parallelism replace each layer's mask by is_causal=True, which would lose windows, documents and
padding. ``AccelerateHooks`` removes these hooks before each call and restores them when ``sequence_parallel`` ends.
``trainer.py`` describes the device mesh that accelerate sees.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ring_attn_core.masks import causal, full
from ring_attn_core.problem.strategies import Strategy
from ring_attn_core.runs import Band

from ..ring.groups import group_name, group_of, ranks_of
from .mask_functions import MaskFunction, Pattern, candidates, fits, intervals

NAME = "ring"
"""The value of ``attn_implementation``."""

ACCELERATE_HOOK = "_attach_context_parallel_hooks.<locals>._self_attn_pre_forward_hook"
"""The name of accelerate's hook function, which removes a layer's mask."""


class CallRing(NamedTuple):
    """The ring of a model: the arguments of ring_attention that all its layers share. A call with ``layout`` "balanced" makes a
    copy with the BalancedLayout of its documents."""

    group: dist.ProcessGroup | None = None
    layout: Any = "zigzag"
    strategy: Strategy = "auto"
    backend: str = "auto"

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return ranks_of(self.group)


class LayerMask(NamedTuple):
    """The mask of one kind of layer, such as those with a window, for this rank's tokens. The layers get it as attention_mask."""

    ring: CallRing
    band: Band
    length: int
    extents: Tensor | None = None
    key_mask: Tensor | None = None
    offsets: Tensor | None = None
    """``int64`` [1 or batch, seq_local], the position of each token in its document, tree path or unpacked row."""
    dropout_seed: int | None = None
    cached: RunningCall | None = None
    """The ``CachedCall`` whose cache the layers continue; None without a cache."""
    key_extents: Tensor | None = None

    def __getitem__(self, key: Any) -> Any:
        """Return a field. Raise ValueError if a layer indexes the mask as a tensor, as for scores that it computes by itself."""
        if isinstance(key, tuple):
            raise ValueError(
                'a layer reads its attention_mask as a tensor [batch, 1, tokens, tokens], which attn_implementation="ring" never '
                "makes: such a model runs with another attn_implementation, unsharded"
            )
        return tuple.__getitem__(self, key)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        """Raise ValueError, because torch got this mask: a layer has run outside of the ``with`` that made the mask."""
        raise ValueError(
            "a layer of a call made inside sequence_parallel runs outside of it, as when activation checkpointing recomputes it: "
            "call backward inside the with as well"
        )


class NoWindow(NamedTuple):
    """The mask of layers with an invalid window, ``size`` < 1. Some models request such a mask although no layer uses it."""

    size: int


@dataclass(eq=False, kw_only=True)
class RunningCall(ABC):
    """A call of a model in progress: a ``GlobalBatch`` or, with a cache, a ``CachedCall``."""

    device: torch.device
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The model's arguments on this rank."""
    longest: Tensor | None = None
    """The largest of the global position_ids, as a 0-d tensor; a shard may lack it. None if every rank computes all tokens."""
    model: nn.Module | None = None
    wrapped: bool = False
    """True if the hooks of the wrapper around ``model`` began the call."""
    scope: ExitStack = field(default_factory=ExitStack)
    """The callbacks that undo the call's changes to the model; they run when the call ends."""
    attention_calls: int = 0
    """The number of calls of ``ring_attention_forward`` so far, without those in compiled graphs."""
    cached: ClassVar[bool] = False

    @abstractmethod
    def begin(self, model: PreTrainedModel) -> None:
        """Prepare ``model`` and its cache for the call. Add callbacks to ``scope`` that undo the changes when the call ends."""

    @abstractmethod
    def mask_of(self, pattern: Pattern) -> LayerMask:
        """Return the mask, in this call, of the layers that have ``pattern``."""


_running: ContextVar[RunningCall | None] = ContextVar("ring_attn_model_call", default=None)
_traced = threading.local()
"""The running call of each thread, for torch.compile: up to torch 2.13 it cannot trace the read of a ContextVar."""


@contextmanager
def during(call: RunningCall) -> Iterator[None]:
    """Make ``call`` the running call of this thread inside this ``with``."""
    outer, token = _running.get(), _running.set(call)
    _traced.call = call
    try:
        yield
    finally:
        _running.reset(token)
        _traced.call = outer


def running() -> RunningCall | None:
    """Return the innermost running call of this thread, or None."""
    return getattr(_traced, "call", None) if torch.compiler.is_compiling() else _running.get()


def ring_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    config: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **others: Any,
) -> LayerMask | NoWindow:
    """Return the mask of one kind of layer, or NoWindow if ``local_size`` < 1. Functions such as create_causal_mask call it.

    Raise ValueError if the mask fits no pattern of ``mask_functions.py``. Under torch.compile, inside ``sequence_parallel``,
    the likeliest pattern is taken without samples. Outside, on one rank, one interval of keys for each query is enough.
    """
    offset, call = others.get("q_offset", 0), running()
    cached = call is not None and call.cached  # such a call reports kv_length as if its cache were empty
    if kv_length != q_length or (isinstance(offset, int) and offset != 0 and not cached) or others.get("kv_offset", 0):
        raise ValueError(
            f'attn_implementation="ring" got {q_length} queries and {kv_length} keys: cross attention and '
            "caches of other kinds do not run over a ring. Generate inside sequence_parallel, which keeps a cache of its own, "
            "without cache, past_key_values, cache_implementation and use_cache"
        )
    if local_size is not None and local_size < 1:
        return NoWindow(local_size)
    tried = candidates(local_size, "allow_is_bidirectional_skip" in others, getattr(config, "attention_chunk_size", None))
    if call is None:
        return _on_one_device(mask_function, attention_mask, tried, local_size, (others["batch_size"], q_length))
    if torch.compiler.is_compiling():
        if others.get("use_vmap"):
            raise ValueError(_unknown(config))
        return call.mask_of(tried[0])
    for pattern in tried:
        if fits(pattern, mask_function, local_size, q_length, call.device):
            return call.mask_of(pattern)
    raise ValueError(_unknown(config))


def _unknown(config: Any) -> str:
    return (
        f'attn_implementation="ring" does not know a mask of {type(config).__name__}: it is neither causal nor full, no window '
        "and no chunks, perhaps with blocks or a prefix of its own. Such models run with another attn_implementation, unsharded"
    )


def check_alone() -> None:
    """Raise ValueError if the default group has several ranks. Called outside ``sequence_parallel``, where nothing is sharded."""
    if ranks_of(group_of(group_name(None))) > 1:
        raise ValueError(
            'attn_implementation="ring" was called outside of sequence_parallel on a group of several ranks: write "with '
            'ring_attn_torch.transformers.sequence_parallel(model):" around model(...), which shards whole input_ids, labels, '
            "attention_mask and position_ids; a forward that is not called through model(...) does not run in it, nor does "
            "another model that was made inside, of model.config: make that before you enter"
        )


def _on_one_device(
    function: MaskFunction, attention_mask: Tensor | None, tried: list[Pattern], size: int | None, shape: tuple[int, int]
) -> LayerMask:
    """Return the mask outside of ``sequence_parallel``, where one device holds the sequences of ``shape`` [batch, tokens]."""
    check_alone()
    (batch, tokens), ring = shape, CallRing(group_of(group_name(None)), "contiguous")
    device = torch.device("cpu") if attention_mask is None else attention_mask.device
    key_mask = None if attention_mask is None else attention_mask[:, :tokens].bool()
    for pattern in tried:
        if not pattern.chunk and fits(pattern, function, size, tokens, device, batch):
            return LayerMask(ring, pattern.band, tokens, None, key_mask)
    extents = intervals(function, batch, tokens, device)
    if extents is None:
        raise ValueError(_unknown(None))
    ahead = bool((extents[..., 1] > torch.arange(1, tokens + 1, device=device)).any())
    return LayerMask(ring, full() if ahead else causal(), tokens, extents, key_mask)


class AccelerateHooks:
    """accelerate's hooks that replace the masks of a model's layers. ``removed``: (module, key, hook) of each removed hook."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.removed: list[tuple[nn.Module, int, Any]] = []

    def remove(self) -> None:
        """Remove the hooks. Run it before each call of the model, because an Accelerator may prepare the model at any time."""
        for module in self.model.modules():
            for key, hook in list(module._forward_pre_hooks.items()):
                if getattr(hook, "__qualname__", "") == ACCELERATE_HOOK:
                    self.removed.append((module, key, module._forward_pre_hooks.pop(key)))

    def restore(self) -> None:
        """Reinsert each removed hook at its old place, in front of the other forward pre-hooks of its module."""
        for module, key, hook in self.removed:
            hooks = module._forward_pre_hooks
            hooks.update({key: hook} | {other: hooks.pop(other) for other in list(hooks)})
        self.removed.clear()
