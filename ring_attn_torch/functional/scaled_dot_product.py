"""``torch.nn.functional.scaled_dot_product_attention`` over a ring.

``data/dense_masks.py`` of the core converts an attn_mask to arguments of ``ring_attention``: a band (causal or a window),
*extents* (an interval of keys for each query), *key extents* (an interval of queries for each key) and a key mask.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.data.dense_masks import HEADS_DIFFER, NEITHER, dense_mask_arguments
from ring_attn_core.masks import causal, full
from ring_attn_core.model.checks import check_flags
from ring_attn_core.validation import as_number, in_words

from ..call.prepare import under_autocast
from .shards import Arguments, Qkv, RingArguments, Shards, attend, check_dims, dropout_of, shards_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def scaled_dot_product_attention(
    query: Float[Tensor, "batch heads seq_local head_dim"],
    key: Float[Tensor, "batch kv_heads kv_local head_dim"],
    value: Float[Tensor, "batch kv_heads kv_local v_dim"],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    length: int | None = None,
    kv_length: int | None = None,
    dropout_seed: int | Int[Tensor, ""] | None = None,
) -> Float[Tensor, "batch heads seq_local v_dim"]:
    """Compute ``torch.nn.functional.scaled_dot_product_attention`` over a ring, with gradients.

    query, key, value: this rank's shards, ``[batch, heads, tokens, head_dim]``; values may have another ``head_dim``.
    ``is_causal``: query i sees the keys j <= i, also if the lengths differ (top left). ``enable_gqa``: query head h reads head
    ``h // (heads / kv_heads)`` of the keys.

    ``attn_mask``: the global mask in natural order, the same on every rank. It is bool, True for each permitted pair, or floats
    of 0 and -inf. It broadcasts against [batch, heads, length, kv_length]. The masks that a ring computes:
    :mod:`ring_attn_torch.functional`. The values are read on the host; for long sequences pass ``is_causal``, or call
    :func:`ring_attention` with extents. Masks of ``torch.nn.attention.bias.causal_lower_right`` and ``causal_upper_left`` become
    bands without being read. A query that sees no key has out 0.

    ``dropout_p``: needs ``dropout_seed``, as in :func:`ring_attention`; it drops other probabilities than torch. Under autocast
    query, key and value are cast as in torch. ``group``, ``layout`` (a name), ``length``, ``kv_length``: as in ring_attention.

    Raise ValueError, the same on every rank and before anything is sent, if attn_mask holds floats other than 0 and -inf, differs
    between heads, or lacks the form that a ring computes. Raise it too if torch.compile traces an attn_mask, if one is passed
    together with is_causal=True, or if ring_attention refuses an argument.
    """
    ring = RingArguments(group, layout, length, kv_length)

    def prepare() -> tuple[Qkv, Arguments]:
        check_flags(is_causal=as_number(is_causal))
        q, k, v = (under_autocast(x) for x in tokens_first(query, key, value, enable_gqa))
        shards = shards_of(q, k, ring)
        mask = _mask(attn_mask, is_causal, shards, q)
        return (q, k, v), {**shards.arguments, **mask, "scale": scale, **dropout_of(dropout_p, dropout_seed)}

    return attend(prepare, ring).transpose(1, 2)


def tokens_first(query: Any, key: Any, value: Any, enable_gqa: bool) -> Qkv:
    check_flags(enable_gqa=as_number(enable_gqa))
    check_dims({"query": query, "key": key, "value": value}, "batch", "heads", "tokens", "head_dim")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: pass enable_gqa=True if several query heads share a "
            "key head"
        )
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _mask(attn_mask: Any, is_causal: bool, shards: Shards, q: Tensor) -> Arguments:
    if attn_mask is None:
        return {"mask": causal() if is_causal else full()}
    if is_causal:
        raise ValueError("attn_mask beside is_causal=True is an error in torch too: leave out is_causal if the mask is causal")
    queries, keys = shards.lengths
    biases = sys.modules.get("torch.nn.attention.bias")
    if biases is not None and isinstance(attn_mask, biases.CausalBias):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != shards.lengths:
            raise ValueError(
                f"attn_mask is a CausalBias of {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys, and the ring has "
                f"length={queries} and kv_length={keys}: make it for the whole sequence"
            )
        return {"mask": causal(keys - queries if attn_mask.variant == biases.CausalVariant.LOWER_RIGHT else 0)}
    visible = _visible(attn_mask, (q.shape[0], q.shape[2], queries, keys))
    parts = dense_mask_arguments(visible.cpu().numpy())
    if parts is None:
        raise ValueError(f"attn_mask {NEITHER}")
    return shards.mask(parts, q.shape[0], q.device)


def _visible(attn_mask: Any, shape: tuple[int, int, int, int]) -> Tensor:
    """Return bool [1 or batch, queries, keys], True where ``attn_mask``, broadcast to ``shape``, permits attention."""
    if not isinstance(attn_mask, Tensor):
        raise ValueError(f"attn_mask must be a tensor, got {in_words(attn_mask)}")
    if attn_mask.requires_grad:
        raise ValueError("attn_mask requires a gradient, and masks here are constants: pass attn_mask.detach()")
    if torch.compiler.is_compiling():
        raise ValueError(
            "torch.compile hides what attn_mask holds: pass is_causal=True, or call ring_attention with mask, extents"
        )
    sizes = (*[1] * (4 - attn_mask.ndim), *attn_mask.shape)
    if len(sizes) != 4 or any(n not in (1, m) for n, m in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"attn_mask must be whole, in natural order, and broadcast against [batch, heads, length, kv_length] = "
            f"{list(shape)}, got {list(attn_mask.shape)}: pass length= and kv_length= if the shards are padded"
        )
    if attn_mask.dtype == torch.bool:
        visible = attn_mask
    elif attn_mask.is_floating_point():
        visible = attn_mask == 0
        if not (visible | (attn_mask == float("-inf"))).all():
            raise ValueError(
                "attn_mask adds numbers other than 0 and -inf to the scores, which would have to travel round the ring: biases "
                "by position are alibi_slopes of ring_attention"
            )
    else:
        raise ValueError(f"attn_mask must be bool, True where attention is permitted, or hold 0 and -inf, got {attn_mask.dtype}")
    visible = visible.reshape(sizes)
    if not (visible == visible[:, :1]).all():
        raise ValueError(f"attn_mask {HEADS_DIFFER}")
    return visible[:, 0].expand(-1, *shape[2:])
