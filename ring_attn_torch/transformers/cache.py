"""The cache of ``generate`` over a ring: RingCache holds keys and values, CachedCall is one model call that uses it.

The first call shards its tokens like a batch without a cache, and so does a later one with more than ``FEW`` tokens that keeps
the logits of one. Then ``prefill`` attends over the ring, and a sum over the ranks collects the hidden states of the kept logits.
In other calls every rank computes all new tokens, and ``tree_attention_decode`` merges the ranks' partial attention.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils
from transformers.cache_utils import Cache, DynamicCache

from ring_attn_core.cache.checks import check_order
from ring_attn_core.cache.spec import CacheSizes
from ring_attn_core.data.settings import BALANCED
from ring_attn_core.layouts import padded_local

from ..data.layout import positions
from ..inference.cache import KVCache
from ..inference.merge import sum_over_ranks
from ..inference.prefill import prefill
from ..inference.states import last_tokens
from ..inference.step import DecodeStep
from ..inference.tree_attention import tree_attention_decode
from ..ring.groups import rank_in
from .masks import CallArguments, CallRing, LayerMask, Pattern, RunningCall
from .mixers import mixers
from .models import check_cacheable
from .states import LinearShard, LinearStates, attention_layers

PAGE = 256
"""The minimum number of tokens by which a rank's part of the cache grows."""

FEW = 16
"""The largest number of new tokens that a call after the first does not shard, if the call keeps the logits of one token."""

NAMES = "cache", "past_key_values"
"""Names of the cache argument: "cache" since transformers 5.24, "past_key_values" before."""


def cache_name(model: PreTrainedModel) -> str:
    for interface in (model.forward, masking_utils.create_causal_mask):
        parameters = inspect.signature(interface).parameters
        if found := [name for name in NAMES if name in parameters]:
            return found[0]
    return NAMES[-1]


class RingCache(LinearStates, Cache):
    """The cache of ``generate()`` over a ring; its first layer makes the :class:`KVCache`. ``tokens``: of a row, with padding."""

    def __init__(self, ring: CallRing, layers: int, attention: list[int] | None = None) -> None:
        Cache.__init__(self, layers=[])
        LinearStates.__init__(self)
        self.ring, self.depth, self.tokens = ring, layers, 0
        self.kv_layers = {layer: i for i, layer in enumerate(range(layers) if attention is None else attention)}
        self.updated = 0
        """The layer whose attention runs."""
        self.kv: KVCache | None = None
        self.inside = False
        """True during a call inside sequence_parallel that fills or continues this cache."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RingCache:
        """Copy the cache for the same ring. Process groups cannot be copied, so both caches share the group."""
        memo[id(self.ring)] = self.ring
        other = copy.copy(self)
        vars(other).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items()})
        return other

    def holding(self, k: Tensor, v: Tensor, tokens: int, local: int | None) -> KVCache:
        """Return the KVCache with room for ``tokens`` more per row. ``local``: the most that a rank stores, None: even shares."""
        if self.kv is None:
            sizes = CacheSizes(len(self.kv_layers), k.shape[2], k.shape[3], v.shape[3])
            self.kv = KVCache.make(sizes, len(k), tokens, dtype=k.dtype, page=PAGE, group=self.ring.group, device=k.device)
        known, slots = self.kv.host_state, self.kv.spec.slots
        fullest = lambda: max(map(max, known.counts or self.kv.counts.tolist()))  # type: ignore[union-attr]
        if max(known.lengths) + tokens > slots * self.ring.ranks if local is None else fullest() + local > slots:
            self.kv.reserve(max(tokens, self.tokens // 8))
        return self.kv

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged: attention itself appends them to the cache."""
        if not self.inside:
            raise ValueError(
                "this is the cache of a ring, of which every rank has a part: call the model inside sequence_parallel, or begin "
                "without a cache"
            )
        self.updated = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (query_length, 0): the number and offset of the keys in a mask. It omits cached keys; attention adds them."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """Return False for each layer: no layer is linear attention, so generate() counts the cached tokens."""
        return [False] * self.depth

    @property
    def is_croppable(self) -> bool:
        return not self.conv  # whose layers have a state of all tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove n tokens from the end of each row for -n. For a positive n keep the first n, as in transformers 5.13."""
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.tokens - tokens_to_remove)
        if removed and not self.is_croppable:
            raise ValueError("the states of linear layers are of all tokens so far, none of which can be removed: begin again")
        if removed and self.kv is not None:
            self.kv.rollback((self.kv.lengths - removed).clamp(min=0))
            self.tokens = max(0, self.tokens - removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.kv is not None:
            self.kv.fork(beam_idx.tolist(), list(range(len(beam_idx))))
        self.keep_rows(beam_idx)

    def reset(self) -> None:
        self.kv, self.tokens = None, 0
        LinearStates.__init__(self)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError("a cache on a ring keeps its number of rows: repeat the rows of input_ids, then generate")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ValueError("a cache on a ring keeps its number of rows: generate from the rows that you want, without it")


@dataclass(eq=False)
class CachedCall(LinearShard, RunningCall):
    """A running call that fills or continues a cache, with the lengths, padding and cache placement of its tokens. ``tokens``:
    new tokens of each row, padding included; ``lengths``: without. ``local``: tokens in this rank's shard of a row, or None if
    each rank computes all. ``valid``: bool [batch, tokens], False for padding. ``keep``: logits of the last tokens that are
    requested. ``own``: int64 [batch, local], each shard token's index among its row's new ones, -1 for padding. ``step``: None
    until the first layer sets it. ``layer``: the linear layer that runs."""

    cache: RingCache
    tokens: int
    local: int | None
    lengths: list[int]
    valid: Tensor | None
    keep: int
    own: Tensor | None = None
    step: DecodeStep | None = None
    layer: int = 0
    cached: ClassVar[bool] = True

    def mask_of(self, pattern: Pattern) -> LayerMask:
        if pattern.chunk or pattern.band.lo != 0:
            raise ValueError(
                "this layer sees chunks, or tokens after its own, and a cache on a ring knows causal attention, with a window or "
                'without: generate outside of sequence_parallel, after model.set_attn_implementation("sdpa")'
            )
        return LayerMask(self.cache.ring, pattern.band, self.tokens, cached=self)

    def attend(self, module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], window: int | None, score: dict[str, Any]) -> Tensor:
        """Append a layer's k and v to the cache, and compute its attention. ``window``: the earlier tokens seen."""
        (q, k, v), ring, kv = qkv, self.cache.ring, self.cache.kv
        check_order(ring.order)
        if self.step is None:
            kv = self.cache.holding(k, v, self.tokens if self.local is None else self.local * ring.ranks, self.local)
            if self.local is None:
                self.step = kv.step(self.tokens, valid=self.valid)
            else:
                self.step = kv.prefill_step(self.local, ring.layout, self.lengths)
        assert kv is not None
        step, layer = self.step, self.cache.kv_layers[self.cache.updated]
        if step.layout is not None:
            where: Any = {"strategy": ring.strategy, "backend": ring.backend}
            return prefill(q, k, v, kv, layer, step, window=window, **where, **score)[0]
        kv.append(layer, k, v, step)
        backend = ring.backend if ring.backend in ("blockwise", "triton") else "auto"
        part: dict[str, Any] = {"backend": backend, **kv.part(layer, step)._asdict()}
        return tree_attention_decode(q, q_positions=step.positions, window=window, group=ring.group, **part, **score)

    def begin(self, model: PreTrainedModel) -> None:
        """Allow cache updates during the call. If tokens are sharded, add a hook that sums ``last_tokens`` over the ranks."""
        self.cache.inside = True
        self.scope.callback(setattr, self.cache, "inside", False)
        if self.local is None:
            return

        def gather_last(_: nn.Module, __: Any, output: Any) -> Any:
            assert self.step is not None and self.cache.kv is not None
            last = sum_over_ranks(
                last_tokens(output[0], self.step.positions, self.step.lengths, self.keep), self.cache.ring.group
            )
            if isinstance(output, tuple):
                return (last, *output[1:])
            output["last_hidden_state"] = last
            return output

        self.scope.callback(model.base_model.register_forward_hook(gather_last).remove)

    def end(self) -> None:
        assert self.step is not None and self.cache.kv is not None
        self.cache.kv.advance(self.step)
        self.cache.tokens += self.tokens


def cached_call(call: CallArguments) -> CachedCall:
    (batch, count), given, cache, tokens, device = call.shape, call.by_name, call.cache, call.tokens, call.tokens.device
    keep = max(1, int(given.get("logits_to_keep", 1)))
    position_ids, mask = given.get("position_ids"), given.get("attention_mask")
    if position_ids is None:
        position_ids = torch.arange(cache.tokens, cache.tokens + count, device=device)[None].expand(batch, -1)
    present = None if mask is None else mask[:, -count:].to(device).bool()
    if present is not None and bool(present.all()):
        present = None
    lengths = [count] * batch if present is None else present.sum(1).tolist()
    kwargs = given | {cache_name(call.model): cache, "use_cache": True, "position_ids": position_ids}
    kwargs.pop("token_type_ids", None)
    local = longest = shard = None
    states = bool(cache.conv) and (count > 1 or present is not None)  # linear layers have functions for one more token alone
    if not cache.tokens or (count > FEW and keep == 1) or states:
        layout, ranks = call.ring.layout, call.ring.ranks
        local, longest = padded_local(layout, ranks, count), position_ids.max()
        own = positions(layout, ranks, count, rank_in(call.ring.group)).to(device).long()
        padding = 0 if present is None else (~present).sum(1, keepdim=True)
        shard = own.masked_fill(own >= torch.tensor(lengths, device=device)[:, None], -1)
        index = (own + padding).clamp(max=count - 1).expand(batch, -1)  # moves the padding from left to right
        name = "input_ids" if "input_ids" in given else "inputs_embeds"
        kwargs[name] = tokens.gather(1, index if tokens.ndim == 2 else index[..., None].expand(-1, -1, tokens.shape[2]))
        whole = position_ids.to(device).expand(*position_ids.shape[:-2], batch, count)
        kwargs["position_ids"] = whole.gather(-1, index.expand(*whole.shape[:-1], local))
        kwargs["logits_to_keep"] = keep
    kwargs["attention_mask"] = torch.ones(batch, local or count, dtype=torch.bool, device=device)
    return CachedCall(cache, count, local, lengths, present, keep, shard, device=device, kwargs=kwargs, longest=longest)


def cache_of(call: CallArguments) -> RingCache | None:
    name = cache_name(call.model)
    kept = call.by_name.get(name)
    if kept is None and not call.by_name.get("use_cache"):
        return None
    check_cacheable(call.model)
    if "labels" in call.by_name:
        raise ValueError(f"a call with labels keeps no cache: leave {name} and use_cache out")
    if call.ring.layout == BALANCED:
        raise ValueError(
            'layout="balanced" assigns the documents of a batch to the ranks, and a cache shares one growing text: to generate, '
            'enter with another layout, such as sequence_parallel(model, layout="zigzag")'
        )
    if isinstance(kept, RingCache):
        if kept.ring != call.ring:
            raise ValueError(f"{name} is a cache of another ring or layout: begin without it")
        return kept
    plain = type(kept) is DynamicCache and not kept.offloading
    if kept is not None and not (plain and not kept.get_seq_length()):
        what = "one that has tokens" if plain else "one that offloads" if type(kept) is DynamicCache else "of another kind"
        raise ValueError(
            f"{name} is a {type(kept).__name__}, {what}, and a ring keeps a RingCache, which it makes itself: leave {name} and "
            f"cache_implementation out, or pass the {name} of what a call inside sequence_parallel returned"
        )
    text = call.model.config.get_text_config()
    return RingCache(call.ring, text.num_hidden_layers, attention_layers(text) if mixers(call.model) else None)
