"""The attention function that transformers calls in place of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ring_attn_core import masks
from ring_attn_core.runs import Band

from ..call.signature import ring_attention
from ..ring.groups import group_name, group_of
from .cached_call import CachedMask
from .global_batch import LayerMask, ModelRing
from .masks import ask, check_alone
from .pattern import NoWindow

UNHEEDED = {
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "token_type_ids",
    "use_cache",
}
"""Ignored arguments: their documents, positions and causality are already in the mask."""


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
    """Compute the attention of one layer: query [batch, heads, tokens, head_dim] -> (out [batch, tokens, heads, v_dim], None).

    ``attention_mask``: the return value of ``ring_mask`` for this kind of layer. ``s_aux`` or ``sinks``: [heads], as sinks of
    :func:`ring_attention`. ``sliding_window`` and ``is_causal`` are used only without a mask, as in eager attention.

    Under autocast, query, key and value are cast as in transformers' own attention. Raise ValueError if an argument is not
    supported, and name it.
    """
    name = type(module).__name__
    ask()
    query, key, value = _autocast(query), _autocast(key), _autocast(value)
    for argument, given in others.items():
        if given is not None and argument not in UNHEEDED:
            raise ValueError(
                f'{name} passes {argument} to its attention, which attn_implementation="ring" cannot honour: such a layer runs '
                "with another attn_implementation, unsharded"
            )
    if others.get("output_attentions"):
        raise ValueError(
            'output_attentions=True asks for the weights of attention, tokens times tokens, which attn_implementation="ring" '
            "never makes: leave it out"
        )
    if attention_mask is None:
        causes = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        attention_mask = _without_mask(name, bool(causes), sliding_window, query.shape[2])
    if isinstance(attention_mask, NoWindow):
        raise _no_window(name, attention_mask.size)
    if isinstance(attention_mask, CachedMask):
        if dropout:
            raise ValueError(f"{name} drops {dropout} of its attention in a call with a cache: call model.eval() first")
        options = {"scale": scaling, "softcap": softcap, "sinks": s_aux if sinks is None else sinks}
        return attention_mask.attend(module, (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), options), None
    if not isinstance(attention_mask, LayerMask):
        got = (
            f"{attention_mask.dtype} {list(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else type(attention_mask)
        )
        raise ValueError(
            f'{name} got a mask that attn_implementation="ring" did not make, {got}: pass attention_mask [batch, tokens] of 0 '
            "and 1, and packed documents as position_ids that begin again; additive and 4-D masks do not travel round a ring"
        )
    seen, extra = attention_mask, {}
    if dropout:
        if seen.dropout_seed is None:
            raise ValueError(
                f"{name} drops {dropout} of its attention, and has no seed that all ranks share: call the model inside "
                "sequence_parallel, or set attention_dropout=0 in its config"
            )
        extra = {"dropout_rate": dropout, "dropout_seed": seen.dropout_seed + 7919 * getattr(module, "layer_idx", 0)}
    out = ring_attention(
        _tuned(module, query, seen).transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        group=seen.ring.group,
        layout=seen.ring.layout,
        mask=seen.band,
        extents=seen.extents,
        key_mask=seen.key_mask,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux if sinks is None else sinks,
        length=seen.length,
        strategy=seen.ring.strategy,
        backend=seen.ring.backend,
        **extra,
    )
    return out, None


def _autocast(x: Tensor) -> Tensor:
    """Return a tensor in the dtype of autocast, if it is on: rotary embeddings leave q and k in float32, with v in 16 bits."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def _without_mask(name: str, causes: bool, window: int | None, tokens: int) -> LayerMask:
    """Return the mask of a layer that gets none from its model, on one device."""
    try:
        check_alone()
    except ValueError as error:
        raise ValueError(f"{name} got no mask: {error}") from None
    band: Band = masks.full()
    if window is not None and window < 1:
        raise _no_window(name, window)
    if causes:
        band = masks.causal() if window is None else masks.sliding_window(window - 1)
    return LayerMask(ModelRing(group_of(group_name(None)), "contiguous"), band, tokens)


def _no_window(name: str, size: int) -> ValueError:
    return ValueError(
        f"{name} is a layer with a sliding window, and its config says sliding_window={size}, in which a token sees nothing: set "
        "sliding_window to 1 or more, or layer_types to full_attention"
    )


def _tuned(module: nn.Module, query: Tensor, seen: LayerMask) -> Tensor:
    """Return the queries of a Llama 4 layer without rotary embedding, scaled by their positions in the document.

    Llama 4 multiplies the query at position p by log(1 + floor((p + 1) / floor_scale)) attn_scale + 1, and counts p within the
    shard. This replaces the factor by that of the position in the document.
    """
    if seen.offsets is None or not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    floor_scale, attn_scale = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]
    factor = lambda p: torch.log1p(torch.floor((p.float() + 1.0) / floor_scale)) * attn_scale + 1.0
    local = torch.arange(query.shape[2], device=query.device)
    ratio = factor(seen.offsets) / factor(local)
    return (query * ratio[:, None, :, None]).to(query.dtype)
