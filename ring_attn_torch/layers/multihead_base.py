"""The base class of the replacements for torch.nn.MultiheadAttention: weights, input checks and mask conversion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attn_core.constructor import extract
from ring_attn_core.layouts import padded_local
from ring_attn_core.masks import causal, full
from ring_attn_core.problem.checks import check_dropout_rate
from ring_attn_core.problem.options import Options

from ..block import merge
from ..data.layout import to_layout
from ..ring.agreement import same_error
from ..ring.groups import is_dtensor, rank_in, ranks_of, ring_of
from .dense_mask import DenseMaskArguments, mask_arguments, visible_of, visible_pairs
from .ring import LayerRing

Tensors = tuple[Tensor, Tensor, Tensor]


class CallOptions(NamedTuple):
    key_padding_mask: Tensor | None
    need_weights: bool | None
    attn_mask: Tensor | None
    is_causal: bool
    length: int | None = None
    kv_length: int | None = None


@dataclass(frozen=True)
class MultiheadArguments:
    """The constructor arguments of ``torch.nn.MultiheadAttention``."""

    embed_dim: int
    num_heads: int
    dropout: float = 0.0
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    batch_first: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


class MultiheadBase(nn.MultiheadAttention):
    """The base class of replacements for ``torch.nn.MultiheadAttention`` over a ring. A subclass defines ``forward``."""

    def __init__(self, arguments: MultiheadArguments) -> None:
        check_dropout_rate(arguments.dropout)
        super().__init__(**vars(extract(MultiheadArguments, arguments)))
        self.ring, self.options = extract(LayerRing, arguments), extract(Options, arguments)

    def _reset_parameters(self) -> None:
        """Reset the parameters, then clear the flag that lets TransformerEncoderLayer's fast path attend within a shard only."""
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def _taken(self, inputs: Tensors, call_options: CallOptions) -> tuple[Tensors, DenseMaskArguments, Options]:
        """Check query, key and value of a call. Return (the three inputs batch-first, this rank's mask, the call's options)."""
        query, key, _ = inputs
        with same_error(ring_of(self.ring.group)):
            self._check(*inputs, call_options.need_weights)
            q, k, v = (self._batch_first(x) for x in inputs)
            options = replace(self.options, length=call_options.length, kv_length=call_options.kv_length)
            mask, options = self._mask_of(q, k, call_options, options)
            if call_options.key_padding_mask is not None:
                present = _present(call_options.key_padding_mask, key, k)
                mask = mask._replace(key_mask=present if mask.key_mask is None else present & mask.key_mask)
        return (q, k, v), mask, options

    def _check(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool | None) -> None:
        if need_weights:
            raise ValueError(
                "need_weights=True asks for the weights of attention, tokens times tokens, which are never made: leave it out, "
                "or pass need_weights=False"
            )
        dtype, sizes = self.out_proj.weight.dtype, (self.embed_dim, self.kdim, self.vdim)
        dtypes = {name: x.dtype for name, x in self.named_parameters() if not name.startswith("bias_")}  # bias_k takes lse's
        casts = torch.is_autocast_enabled(self.out_proj.weight.device.type) and torch.float64 not in dtypes.values()
        if len({*dtypes.values()}) > 1 and not casts:
            parts = ", ".join(f"{name} {x}" for name, x in dtypes.items())
            raise ValueError(f"the weights must have one dtype, got {parts}: cast the module with .to(dtype)")
        for name, x, size in zip(("query", "key", "value"), (query, key, value), sizes, strict=True):
            if not isinstance(x, Tensor) or is_dtensor(x) or x.is_nested:
                raise ValueError(f"{name} must be a dense torch.Tensor, this rank's shard, got {type(x).__name__}")
            if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
                raise ValueError(f"{name} is {x.dtype} and the weights are {dtype}: cast one of them, or call under autocast")
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != size:
                axes = "batch, tokens" if self.batch_first else "tokens, batch"
                raise ValueError(
                    f"{name} must be [{axes}, {size}], or without a batch, as the other two, [tokens, {size}], got "
                    f"{list(x.shape)} beside query {list(query.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"key {list(key.shape)} and value {list(value.shape)} must have the same tokens and batch")

    def _batch_first(self, x: Tensor) -> Tensor:
        """Return an input as [batch, tokens, features]. On 3-D tensors it is its own inverse, as ``_returned`` uses it."""
        return x[None] if x.ndim == 2 else x if self.batch_first else x.transpose(0, 1)

    def _mask_of(self, q: Tensor, k: Tensor, call_options: CallOptions, options: Options) -> tuple[DenseMaskArguments, Options]:
        """Return the mask of this rank's shards, and the options with the lengths of attn_mask, if any."""
        attn_mask = call_options.attn_mask
        if attn_mask is None:
            return DenseMaskArguments(causal() if call_options.is_causal else full()), options
        visible = visible_pairs(attn_mask, q.shape[0], self.num_heads)
        ring, layout, lengths = ring_of(self.ring.group), self.options.layout, tuple(visible.shape[1:])
        local = tuple(padded_local(layout, ranks_of(ring), length) for length in lengths)
        passed = options.length, options.kv_length
        if local != (q.shape[1], k.shape[1]) or any(g not in (None, own) for g, own in zip(passed, lengths, strict=True)):
            raise ValueError(
                f"attn_mask must be whole, all queries by all keys in natural order, got {list(attn_mask.shape)} for shards of "
                f"{q.shape[1]} queries and {k.shape[1]} keys on {ranks_of(ring)} ranks, length={options.length} and "
                f"kv_length={options.kv_length}"
            )
        mask = mask_arguments(visible, call_options.is_causal)
        own = lambda x: to_layout(x, layout, ranks_of(ring)).chunk(ranks_of(ring), 1)[rank_in(ring)]
        each = lambda x: None if x is None else own(x).expand(q.shape[0], *[-1] * (x.ndim - 1))
        mask = mask._replace(extents=each(mask.extents), key_mask=each(mask.key_mask))
        return mask, replace(options, length=lengths[0], kv_length=lengths[1])

    def _projected(self, *inputs: Tensor) -> Iterator[Tensor]:
        separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            yield F.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim))

    def _with_bias_kv(self, q: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """Add the key of add_bias_kv, if any, visible to every query, to an attention result (out, lse). Return the new out."""
        if self.bias_k is None or self.bias_v is None:
            return out
        bias_k, bias_v = (x.unflatten(-1, (self.num_heads, -1)).to(lse.dtype) for x in (self.bias_k, self.bias_v))
        score = (q.to(lse.dtype) * bias_k).sum(-1) * self.head_dim**-0.5
        return merge((out, lse), (bias_v, score))[0].to(out.dtype)

    def _returned(self, out: Tensor, query: Tensor) -> Tensor:
        projected = self.out_proj(out.flatten(2))
        return projected[0] if query.ndim == 2 else self._batch_first(projected)


def _present(key_padding_mask: Tensor, key: Tensor, k: Tensor) -> Tensor:
    expected = key.shape[:1] if key.ndim == 2 else k.shape[:2]
    if key_padding_mask.shape != expected:
        raise ValueError(
            f"key_padding_mask must be {list(expected)}, this rank's shard [batch, tokens of key] (without a batch [tokens]), "
            f"got {list(key_padding_mask.shape)}"
        )
    return visible_of("key_padding_mask", key_padding_mask).expand(k.shape[:2])
