"""torch.nn.MultiheadAttention over a ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.kernels.backends import check_vendor
from ring_attn_core.layouts import padded_local
from ring_attn_core.masks import causal, full
from ring_attn_core.problem.checks import check_dropout_rate
from ring_attn_core.problem.options import Options

from ..api import attention
from ..arguments import Arrays
from ..attend.dropout import Dropout
from ..block import merge
from ..data.layout import to_layout
from ..ring.agreement import refuse, tell
from ..ring.groups import group_name, group_of, is_dtensor, rank_in, ranks_of
from .attention import ring_of
from .whole_mask import Parts, parts_of, visible_of, whole_of


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` over a ring: its constructor, forward and state dict, on shards of the sequence.

    ``group``, ``layout``, ``strategy``, ``backend``, ``deterministic``: as in :func:`ring_attention`. All other arguments are
    torch's. A rank's gradients of the weights are its own part: sum them over the ranks, as :func:`sum_gradients` does.

    What differs, each on purpose:
        - The call returns ``(out, None)``, also by default: the weights of attention, tokens times tokens, are never made.
        - ``is_causal=True`` needs no ``attn_mask``. Beside one it must tell the truth.
        - A query that sees no key attends to nothing and its attention is 0, where torch returns NaN or 0 by the path it takes.
        - Dropout drops other probabilities than torch's does, the same ones on any number of ranks.

    Refused, by name: ``need_weights=True``; an additive mask with numbers other than 0 and -inf; an ``attn_mask`` that is not the
    same for all heads, or neither a band nor one interval of keys for each query (apart from keys that are hidden from
    everybody), or that torch.compile traces; ``is_causal=True`` beside an ``attn_mask`` that is not causal; ``add_bias_kv`` with
    dropout while training; ``dropout=1``; nested tensors, DTensors, inputs of several dtypes, and what ring_attention refuses.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        layout: str = "zigzag",
        strategy: str = "auto",
        backend: str = "auto",
        deterministic: bool = False,
    ) -> None:
        check_dropout_rate(dropout)
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype)
        self.options = Options(layout=layout, strategy=strategy, backend=backend, deterministic=deterministic)
        check_vendor(self.options, differentiates_lse=add_bias_kv)
        self.group = group

    def _reset_parameters(self) -> None:
        """As torch's; and what says that q, k and v share a weight says no from then on: with it torch's encoder layer would
        take this layer's weights and attend by itself, within a shard."""
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        length: int | None = None,
        kv_length: int | None = None,
        dropout_seed: int | Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Shards in layout order, query [tokens, batch, embed_dim], with batch_first [batch, tokens, embed_dim], or [tokens,
        embed_dim] -> (out like query, None). key and value alike, of kdim and vdim features.

        ``key_padding_mask`` [batch, tokens of key] or [tokens of key]: this rank's shard, True or -inf where a key is padding.
        ``attn_mask`` [all queries, all keys] or [batch * heads, all queries, all keys]: whole, in natural order, the same on
        every rank; its values are read to the host, so for long sequences pass ``is_causal=True`` alone.

        ``length``, ``kv_length``: as in :func:`ring_attention`; None: what attn_mask has, or all that the shards hold.
        ``dropout_seed``: as there; None: drawn from torch's generator, and while training on several ranks broadcast from the
        first. Without ``self.training`` or ``dropout`` there is none.

        Raises ValueError, the same on every rank and before anything is sent, for what the class refuses and for shapes that do
        not fit.
        """
        try:
            self._check(query, key, value, need_weights)
            q, k, v = (self._batch_first(x) for x in (query, key, value))
            options = replace(self.options, length=length, kv_length=kv_length)
            parts, options = self._seen(q, k, attn_mask, is_causal, options)
            if key_padding_mask is not None:
                present = _present(key_padding_mask, key, k)
                parts = parts._replace(key_mask=present if parts.key_mask is None else present & parts.key_mask)
        except Exception as error:
            refuse(error, group_of(group_name(self.group)), getattr(getattr(query, "device", None), "type", "cpu"))
            raise  # refuse has raised already, which type checkers do not see
        dropout = None
        if self.training and self.dropout:
            dropout = Dropout(self._seed() if dropout_seed is None else dropout_seed)
            options = replace(options, dropout_rate=self.dropout)
        sinks = torch.zeros(self.num_heads, device=q.device) if self.add_zero_attn else None  # a score of 0 that brings no value
        q, k, v = self._projected(q, k, v)
        arrays = Arrays(parts.extents, parts.key_mask, sinks)
        out, lse = attention(q, k, v, arrays, dropout, replace(options, mask=parts.band), group_name(self.group))
        if self.bias_k is not None and self.bias_v is not None:  # one more key, which every query sees
            bias_k, bias_v = (x.unflatten(-1, (self.num_heads, -1)).to(lse.dtype) for x in (self.bias_k, self.bias_v))
            score = (q.to(lse.dtype) * bias_k).sum(-1) * self.head_dim**-0.5
            out = merge((out, lse), (bias_v, score))[0].to(out.dtype)
        out = self.out_proj(out.flatten(2))
        return out[0] if query.ndim == 2 else self._batch_first(out), None

    def _check(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool | None) -> None:
        """ValueError for weights that are asked for, and for inputs of other types, dtypes and shapes."""
        if need_weights:
            raise ValueError(
                "need_weights=True asks for the weights of attention, tokens times tokens, which are never made: leave it out, "
                "or pass need_weights=False"
            )
        if self.training and self.dropout and self.bias_k is not None:
            raise ValueError(f"add_bias_kv with dropout={self.dropout} does not work while training: leave out one of the two")
        kept, sizes = self.out_proj.weight.dtype, (self.embed_dim, self.kdim, self.vdim)
        for name, x, size in zip(("query", "key", "value"), (query, key, value), sizes, strict=True):
            if not isinstance(x, Tensor) or is_dtensor(x) or x.is_nested:
                raise ValueError(f"{name} must be a dense torch.Tensor, this rank's shard, got {type(x).__name__}")
            if x.dtype != kept and not torch.is_autocast_enabled(x.device.type):
                raise ValueError(f"{name} is {x.dtype} and the weights are {kept}: cast one of them, or call under autocast")
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != size:
                axes = "batch, tokens" if self.batch_first else "tokens, batch"
                raise ValueError(
                    f"{name} must be [{axes}, {size}], or without a batch, as the other two, [tokens, {size}], got "
                    f"{list(x.shape)} beside query {list(query.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"key {list(key.shape)} and value {list(value.shape)} must have the same tokens and batch")

    def _batch_first(self, x: Tensor) -> Tensor:
        """An input as [batch, tokens, features]; and, since that is its own inverse, such an output as the inputs are."""
        return x[None] if x.ndim == 2 else x if self.batch_first else x.transpose(0, 1)

    def _seen(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, options: Options) -> tuple[Parts, Options]:
        """Who sees whom by attn_mask and is_causal, arrays as this rank's shards, and the options with the mask's lengths."""
        if attn_mask is None:
            return Parts(causal() if is_causal else full()), options
        whole = whole_of(attn_mask, q.shape[0], self.num_heads)
        ring, layout, lengths = ring_of(self.group), self.options.layout, tuple(whole.shape[1:])
        local = tuple(padded_local(layout, ranks_of(ring), length) for length in lengths)
        given = options.length, options.kv_length
        if local != (q.shape[1], k.shape[1]) or any(g not in (None, own) for g, own in zip(given, lengths, strict=True)):
            raise ValueError(
                f"attn_mask must be whole, all queries by all keys in natural order, got {list(attn_mask.shape)} for shards of "
                f"{q.shape[1]} queries and {k.shape[1]} keys on {ranks_of(ring)} ranks, length={options.length} and "
                f"kv_length={options.kv_length}"
            )
        parts = parts_of(whole, is_causal)
        own = lambda x: to_layout(x, layout, ranks_of(ring)).chunk(ranks_of(ring), 1)[rank_in(ring)]
        arrays = {name: own(x).expand(q.shape[0], *[-1] * (x.ndim - 1)) for name, x in parts.arrays.items()}
        return Parts(parts.band, **arrays), replace(options, length=lengths[0], kv_length=lengths[1])

    def _projected(self, *inputs: Tensor) -> Iterator[Tensor]:
        """q, k and v [batch, tokens, heads, head_dim]."""
        separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            yield F.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim))

    def _seed(self) -> int:
        """Where dropout draws from: a number of torch's generator, on all ranks the first one's."""
        seed, ring = int(torch.randint(2**31, ())), ring_of(self.group)
        return seed if ring is None or ranks_of(ring) == 1 else tell("dropout of MultiheadAttention", seed, ring)[0]

    def __getstate__(self) -> dict[str, Any]:
        """With the group's name for the group, which can be neither copied nor pickled."""
        return self.__dict__ | {"group": None if self.group is None else group_name(self.group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self.group, str):
            self.group = group_of(self.group)


def _present(key_padding_mask: Tensor, key: Tensor, k: Tensor) -> Tensor:
    """bool [batch, tokens of key]: True where a key is no padding."""
    expected = key.shape[:1] if key.ndim == 2 else k.shape[:2]
    if key_padding_mask.shape != expected:
        raise ValueError(
            f"key_padding_mask must be {list(expected)}, this rank's shard [batch, tokens of key] (without a batch [tokens]), "
            f"got {list(key_padding_mask.shape)}"
        )
    return visible_of("key_padding_mask", key_padding_mask).expand(k.shape[:2])
