"""The attention function ``"ring"`` for transformers, and the changes to a model that make it call this function.

Inside ``sequence_parallel`` each module of a model holds a copy of its config, and the copy is set to "ring": other models that
share the config are not affected. accelerate's hooks for context parallelism replace each layer's mask by is_causal=True, which
would lose windows, documents and padding, so they are off.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from ring_attn_core import masks

from ..call.prepare import under_autocast
from ..call.signature import ring_attention
from ..layers.offload import OffloadedTensors, offload
from ..layers.recompute import recompute
from ..ring.groups import ring_of
from .arguments import REFUSED
from .cache import CachedCall
from .masks import NAME, CallRing, LayerMask, NoWindow, check_alone, running
from .mixers import in_this_call, skip_compiling
from .models import hugging_face_model

IMPLEMENTATION = "_attn_implementation_internal"
"""The attribute in which a config stores the value of ``config._attn_implementation``."""

CHECKPOINT = "_gradient_checkpointing_func"
"""The attribute in which transformers stores a layer's checkpoint function."""

ACCELERATE_HOOK = "_attach_context_parallel_hooks.<locals>._self_attn_pre_forward_hook"
"""The name of accelerate's hook function, which removes a layer's mask."""

IGNORED = {
    *("cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "is_causal", "max_length_k", "max_length_q", "num_items_in_batch"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids", "return_dict"),
    *("token_type_ids", "use_cache"),
}
"""Ignored arguments: the mask holds documents, positions and causality. But ``output_attentions=True`` is refused."""


def ring_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, and return (out [batch, tokens, heads, v_dim], None).

    ``query``: [batch, heads, tokens, head_dim]. ``key``, ``value``: [batch, kv_heads, tokens, dim]. ``attention_mask``: from
    ``ring_mask``; if None, ``sliding_window`` and ``is_causal`` determine the mask. ``s_aux``, ``sinks``: [heads].
    """
    name = type(module).__name__
    call = running()
    if call is not None and not torch.compiler.is_compiling():
        call.attention_calls += 1
    query, key, value = under_autocast(query), under_autocast(key), under_autocast(value)
    for argument, x in others.items():
        if x is not None and argument not in IGNORED:
            raise ValueError(
                f'{name} passes {argument} to its attention, which attn_implementation="ring" cannot honour: such a layer runs '
                "with another attn_implementation, unsharded"
            )
    if others.get("output_attentions"):
        raise ValueError(f'output_attentions=True with attn_implementation="ring": {REFUSED["output_attentions"]}')
    if attention_mask is None:
        causes = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        attention_mask = _without_mask(name, bool(causes), sliding_window, query.shape[2])
    if isinstance(attention_mask, NoWindow):
        raise _no_window(name, attention_mask.size)
    if not isinstance(attention_mask, LayerMask):
        got: Any = type(attention_mask)
        if isinstance(attention_mask, Tensor):
            got = f"{attention_mask.dtype} {list(attention_mask.shape)}"
        raise ValueError(
            f'{name} got a mask that attn_implementation="ring" did not make, {got}: pass attention_mask [batch, tokens] of 0 '
            "and 1, and packed documents as position_ids that begin again; additive and 4-D masks do not travel round a ring"
        )
    mask, k, v = attention_mask, key.transpose(1, 2), value.transpose(1, 2)
    score: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux if sinks is None else sinks}
    if isinstance(mask.cached, CachedCall):
        if dropout:
            raise ValueError(f"{name} drops {dropout} of its attention in a call with a cache: call model.eval() first")
        return mask.cached.attend(module, (query.transpose(1, 2), k, v), mask.band.hi, score), None
    if dropout:
        if mask.dropout_seed is None:
            raise ValueError(
                f"{name} drops {dropout} of its attention, and has no seed that all ranks share: call the model inside "
                "sequence_parallel, or set attention_dropout=0 in its config"
            )
        score |= {"dropout_rate": dropout, "dropout_seed": mask.dropout_seed + 7919 * getattr(module, "layer_idx", 0)}
    out = ring_attention(
        _tune(module, query, mask).transpose(1, 2),
        k,
        v,
        group=mask.ring.group,
        layout=mask.ring.layout,
        mask=mask.band,
        extents=mask.extents,
        key_extents=mask.key_extents,
        key_mask=mask.key_mask,
        length=mask.length,
        **{name: getattr(mask.ring, name) for name in ("strategy", "order", "backend")},
        **score,
    )
    return out, None


def _without_mask(name: str, causes: bool, window: int | None, tokens: int) -> LayerMask:
    try:
        check_alone()
    except ValueError as error:
        raise ValueError(f"{name} got no mask: {error}") from None
    if window is not None and window < 1:
        raise _no_window(name, window)
    band = masks.causal() if window is None else masks.sliding_window(window - 1)
    return LayerMask(CallRing(ring_of(None), "contiguous"), band if causes else masks.full(), tokens)


def _no_window(name: str, size: int) -> ValueError:
    return ValueError(
        f"{name} is a layer with a sliding window, and its config says sliding_window={size}, in which a token sees nothing: set "
        "sliding_window to 1 or more, or layer_types to full_attention"
    )


def _tune(module: nn.Module, query: Tensor, mask: LayerMask) -> Tensor:
    """Rescale the queries of a Llama 4 layer without rotary embedding. Llama 4 multiplies the query at position p by log(1 +
    floor((p + 1) / floor_scale)) attn_scale + 1, but counts p from the start of the shard instead of the document."""
    if mask.offsets is None or not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    floor_scale, attn_scale = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]
    factor = lambda p: torch.log1p(torch.floor((p.float() + 1.0) / floor_scale)) * attn_scale + 1.0
    local = torch.arange(query.shape[2], device=query.device)
    ratio = factor(mask.offsets) / factor(local)
    return (query * ratio[:, None, :, None]).to(query.dtype)


@contextmanager
def ring_configs(model: nn.Module) -> Iterator[None]:
    """Make the text part attend over the ring, by copies of configs, whose later changes go into the originals at the end."""
    pairs = _copies(hugging_face_model(model).config)
    before = [dict(vars(mine)) for _, mine in pairs]
    copy_of = {id(original): mine for original, mine in pairs}
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig) and id(value) in copy_of
    ]
    for module, name, value in held:
        setattr(module, name, copy_of[id(value)])
    try:
        yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)
        for (original, mine), then in zip(pairs, before, strict=True):
            _merge(original, vars(mine), then)
            vars(mine)[IMPLEMENTATION] = vars(original)[IMPLEMENTATION]  # models that were made from the copy keep the copy


def _copies(config: PreTrainedConfig) -> list[tuple[PreTrainedConfig, PreTrainedConfig]]:
    """Return (config, copy) for the text part's config, whose copy has attention "ring", and for each config that contains it."""
    text = config.get_text_config()
    pairs = [(text, copy.copy(text))]
    vars(pairs[0][1])[IMPLEMENTATION] = NAME

    def copied(outer: PreTrainedConfig) -> PreTrainedConfig | None:
        mine = next((mine for original, mine in pairs if original is outer), None)
        parts = (
            {} if mine is not None else {name: copied(x) for name, x in vars(outer).items() if isinstance(x, PreTrainedConfig)}
        )
        if any(part is not None for part in parts.values()):
            mine = copy.copy(outer)
            vars(mine).update({name: part for name, part in parts.items() if part is not None})
            pairs.append((outer, mine))
        return mine

    copied(config)
    return pairs


def _merge(config: PreTrainedConfig, now: dict[str, Any], before: dict[str, Any]) -> None:
    """Set or delete in ``config`` what was set or deleted in its copy since ``before``, except the attention implementation."""
    for name in before.keys() - now.keys():
        vars(config).pop(name, None)
    for name, value in now.items():
        if name != IMPLEMENTATION and (name not in before or value is not before[name]):
            vars(config)[name] = value


class Checkpointing:
    """The layers that support checkpointing, and what ``keep_attention`` replaced. ``offload=True`` puts inputs and (out, lse) on
    the host; shared inputs stay."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.before: dict[nn.Module, Any] = {}
        self.host = OffloadedTensors()
        self.ours: tuple[Any, Any] = (
            skip_compiling(model, lambda function, *inputs: recompute(in_this_call(function), *inputs)),
            skip_compiling(model, lambda function, x, *shared: offload(self.host, in_this_call(function), x, *shared)),
        )

    def keep_attention(self) -> None:
        """Make checkpointed layers save (out, lse). Run it before each call: a Trainer may set checkpointing at any time."""
        self.host = OffloadedTensors()
        for layer in self.layers:
            function = layer.__dict__.get(CHECKPOINT, self.ours[0])
            if function not in self.ours:
                self.before[layer] = function
                offloads = getattr(function, "func", function) is not checkpoint  # but transformers' function that offloads
                setattr(layer, CHECKPOINT, self.ours[offloads])

    def restore(self) -> None:
        for layer, function in self.before.items():
            if layer.__dict__.get(CHECKPOINT) in self.ours:
                setattr(layer, CHECKPOINT, function)


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


def rotary_by_length(model: PreTrainedModel) -> list[nn.Module]:
    """Return the rotary embeddings whose angles depend on the largest position of a call, which a shard may lack."""
    kind: Any = lambda module: getattr(module, "rope_type", "")
    kinds = lambda module: kind(module).values() if isinstance(kind(module), dict) else (kind(module),)
    return [module for module in model.modules() if {"dynamic", "longrope"} & {*kinds(module)}]


@contextmanager
def with_largest_position(rotary: nn.Module) -> Iterator[None]:
    """Pass the largest global position to a rotary embedding inside this ``with``, as one more token, removed afterwards."""

    longest = lambda: None if (call := running()) is None else call.longest

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        last = longest()
        if last is None:
            return None
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        more = torch.cat([position_ids, last.to(position_ids.dtype).expand(*position_ids.shape[:-1], 1)], -1)
        return ((args[0], more, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"position_ids": more})

    def after(_: nn.Module, args: tuple[Any, ...], angles: Any) -> Any:
        if longest() is None:
            return None
        return angles[..., :-1, :] if isinstance(angles, Tensor) else tuple(x[..., :-1, :] for x in angles)

    with rotary.register_forward_pre_hook(before, with_kwargs=True), rotary.register_forward_hook(after):
        yield
