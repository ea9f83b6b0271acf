"""The states of a hybrid model in a cache over a ring: the last tokens before each convolution, and the state of each recurrence.

Every rank holds all of them. A call with several tokens computes them over the ring (``mixers.py``); a call with one token runs
transformers' own functions of one token, by which every rank computes the same.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from ring_attn_core.model.recurrence_steps import EARLIER

from ..inference.merge import sum_over_ranks
from ..inference.states import last_tokens, move_on
from ..recurrence.runs import Where
from .masks import running

UNCOMPILED = "torch.compile does not follow the states of linear layers: leave fullgraph=True out"


class LinearStates:
    """The part of a cache that transformers' linear layers read and write. ``conv`` [batch, channels, taps] and ``recurrent``
    [batch, ...]: the states of each layer; ``before``: the state of the convolution that runs, before this call."""

    def __init__(self) -> None:
        self.conv: dict[int, Tensor] = {}
        self.recurrent: dict[int, Tensor] = {}
        self.before: Tensor | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last tokens before a layer's convolution; None if the call computes over the ring."""
        return self._read(self.conv, layer_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's state; None if the call computes over the ring."""
        return self._read(self.recurrent, layer_idx)

    @torch.compiler.disable(reason=UNCOMPILED)
    def _read(self, states: dict[int, Tensor], layer: int) -> Tensor | None:
        call: Any = running()
        if call is None:
            raise ValueError("this is the cache of a ring: call the model inside sequence_parallel, or begin without a cache")
        call.layer = layer
        call.attention_calls += 1
        return states.get(layer) if call.local is None else None

    @torch.compiler.disable(reason=UNCOMPILED)
    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Keep the last tokens of each row; return ``conv_states`` [batch, channels, local], this rank's shard, unchanged."""
        call: Any = running()
        assert conv_kernel_size is not None
        last = call.last_of(conv_states.mT, conv_kernel_size)
        self.before = self.conv.get(layer_idx)
        if self.before is not None:
            last = move_on(self.before.mT, last, torch.tensor(call.lengths, device=last.device))
        self.conv[layer_idx] = last.mT.contiguous()
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        self.recurrent[layer_idx] = recurrent_states
        return recurrent_states

    def initial(self, layer: int, convolution: bool) -> Tensor | None:
        """Return what a layer continues: the state, or [batch, taps - 1, channels] of a convolution; None at the first call."""
        if not convolution:
            return self.recurrent.get(layer)
        return None if self.before is None else self.before.mT[:, 1:]

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def keep_rows(self, rows: Tensor) -> None:
        for states in (self.conv, self.recurrent):
            states.update({layer: x.index_select(0, rows.to(x.device)) for layer, x in states.items()})


class LinearShard:
    """The part of a ``CachedCall`` that linear layers over the ring use."""

    cache: Any
    lengths: list[int]
    valid: Tensor | None
    own: Tensor | None
    local: int | None
    tokens: int
    layer: int

    @property
    def runs_mixers(self) -> bool:
        """Return True if linear layers run over the ring: not for one more token, and not for a whole row on one rank."""
        return self.local is not None and (self.cache.ring.ranks > 1 or self.valid is not None or self.cache.tokens > 0)

    def tokens_of(self, convolution: bool) -> Where:
        """Return this rank's shard of the new tokens, and what the cache holds of the tokens before."""
        ring, own, extents = self.cache.ring, self.own, None
        if self.valid is not None and own is not None:
            ends = torch.tensor(self.lengths, device=own.device)[:, None].expand_as(own).masked_fill(own < 0, EARLIER)
            extents = torch.stack([torch.full_like(ends, EARLIER), ends], -1).int()
        return Where(ring.group, ring.layout, self.tokens, extents, True, self.cache.initial(self.layer, convolution))

    def last_of(self, x: Tensor, keep: int) -> Tensor:
        """Return the last ``keep`` new tokens of each row of ``x`` [batch, local, dim], on every rank, 0 before the first."""
        assert self.own is not None
        lengths = torch.tensor(self.lengths, device=x.device)
        return sum_over_ranks(last_tokens(x, self.own, lengths, keep), self.cache.ring.group)


def attention_layers(config: Any) -> list[int]:
    return [i for i, layer in enumerate(DynamicCache(config=config).layers) if isinstance(layer, DynamicLayer)]


def cache_objection(model: PreTrainedModel) -> str | None:
    """Return why a hybrid model cannot keep a cache over a ring, or None."""
    text = model.config.get_text_config()
    if "conv_kernel_size" not in inspect.signature(LinearAttentionLayer.update_conv_state).parameters:
        return "this release of transformers hands its cache no whole shards of its convolutions (5.23 does)"
    if not attention_layers(text):
        return "none of its layers has attention, whose cache counts the tokens"
    if getattr(text, "number_of_conv_states", 1) > 1:
        return "some of its layers have several convolutions"
    return None
