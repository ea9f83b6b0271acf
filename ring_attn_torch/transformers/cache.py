"""A transformers Cache whose keys and values are distributed over a ring."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.cache_utils import Cache, DynamicCache

from ring_attn_core.cache.spec import CacheSizes

from ..inference.cache import KVCache
from .global_batch import ModelRing
from .models import text_config

PAGE = 256
"""The minimum number of tokens by which a rank's part of the cache grows."""

NAMES = "cache", "past_key_values"
"""Names of the argument for a cache: the first since transformers 5.24, the second before."""


def cache_name(model: PreTrainedModel) -> str:
    """Return the name of the argument of ``model`` for a cache."""
    for interface in (model.forward, masking_utils.create_causal_mask):
        parameters = inspect.signature(interface).parameters
        for name in NAMES:
            if name in parameters:
                return name
    return NAMES[-1]


def with_cache_renamed(model: PreTrainedModel, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments ``given`` of a call, with the cache under the name that ``model`` uses.

    Raise ValueError if it is passed under both names.
    """
    names = [name for name in NAMES if name in given]
    if len(names) > 1:
        raise ValueError(f"the call has a cache and past_key_values, two names of one argument: pass {cache_name(model)} alone")
    renamed = {cache_name(model) if name in names else name: x for name, x in given.items()}
    return renamed


class RingCache(Cache):
    """The cache of ``model.generate()`` inside ``sequence_parallel``: a :class:`KVCache`, made from the first layer's first keys.

    A call with ``use_cache=True``, or with the empty DynamicCache that ``generate`` makes, returns one as ``cache``
    (``past_key_values`` before transformers 5.24), and the next call continues it. ``tokens`` counts the tokens of a row as
    transformers does, padding on the left included; the KVCache holds no padding.
    """

    def __init__(self, ring: ModelRing, layers: int) -> None:
        super().__init__(layers=[])
        self.ring, self.depth, self.tokens = ring, layers, 0
        self.kv: KVCache | None = None
        self.inside = False
        """True during a call inside sequence_parallel that continues this cache."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RingCache:
        """Return a cache of the same tokens on the same ring, whose group cannot be copied."""
        memo[id(self.ring)] = self.ring
        other = copy.copy(self)
        vars(other).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items()})
        return other

    def holding(self, k: Tensor, v: Tensor, tokens: int) -> KVCache:
        """Return the KVCache, with room for ``tokens`` more of each row.

        The first call makes it for k and v [batch, tokens, kv_heads, dim] like these.
        """
        if self.kv is None:
            sizes = CacheSizes(self.depth, k.shape[2], k.shape[3], v.shape[3])
            at = {"page": PAGE, "group": self.ring.group, "device": k.device}
            self.kv = KVCache.make(sizes, len(k), tokens, dtype=k.dtype, **at)
        elif max(self.kv.host_state.lengths) + tokens > self.kv.spec.slots * self.ring.ranks:
            self.kv.reserve(max(tokens, self.tokens // 8))
        return self.kv

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged: attention itself appends them to the cache.

        Raise ValueError outside of ``sequence_parallel``, because a model would attend to the new tokens alone.
        """
        if not self.inside:
            raise ValueError(
                "this is the cache of a ring, of which every rank has a part: call the model inside sequence_parallel, or begin "
                "without a cache"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of a row, padding included."""
        return self.tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (query_length, 0): masks cover the call's own tokens, and attention adds the cached ones."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the cache grows without a maximum."""
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer, because none is linear attention; generate() then counts the cached tokens."""
        return [False] * self.depth

    @property
    def is_croppable(self) -> bool:
        """True: tokens can be removed from the end."""
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of every row, such as those rejected in speculative decoding: -n removes n tokens.

        A number above 0 is the number of tokens that stay, as in transformers 5.13 and 5.14.
        """
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.tokens - tokens_to_remove)
        if removed and self.kv is not None:
            self.kv.rollback((self.kv.lengths - removed).clamp(min=0))
            self.tokens = max(0, self.tokens - removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i continue from row ``beam_idx[i]``, as beam search does."""
        if self.kv is not None:
            self.kv.fork(beam_idx.tolist(), list(range(len(beam_idx))))

    def reset(self) -> None:
        """Remove all tokens."""
        self.kv, self.tokens = None, 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise ValueError: rows must be repeated before their prompts are read."""
        raise ValueError("a cache on a ring keeps its number of rows: repeat the rows of input_ids, then generate")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Raise ValueError: a finished row stays in the cache."""
        raise ValueError("a cache on a ring keeps its number of rows: generate from the rows that you want, without it")


def cache_of(model: PreTrainedModel, ring: ModelRing, given: dict[str, Any]) -> RingCache | None:
    """Return the cache of a call with the arguments ``given``: a new one in the first call, or None if it uses no cache.

    Raise ValueError, with the reason, if the model cannot keep a cache, or if the cache is of another kind or ring.
    """
    name = cache_name(model)
    kept = given.get(name)
    if kept is None and not given.get("use_cache"):
        return None
    _check_model(model)
    if "labels" in given:
        raise ValueError(f"a call with labels keeps no cache: leave {name} and use_cache out")
    if isinstance(kept, RingCache):
        if kept.ring != ring:
            raise ValueError(f"{name} is a cache of another ring or layout: begin without it")
        return kept
    plain = type(kept) is DynamicCache and not kept.offloading
    if kept is not None and not (plain and not kept.get_seq_length()):
        what = "one that has tokens" if plain else "one that offloads" if type(kept) is DynamicCache else "of another kind"
        raise ValueError(
            f"{name} is a {type(kept).__name__}, {what}, and a ring keeps a RingCache, which it makes itself: leave {name} and "
            f"cache_implementation out, or pass the {name} of what a call inside sequence_parallel returned"
        )
    return RingCache(ring, text_config(model.config).num_hidden_layers)


def _check_model(model: PreTrainedModel) -> None:
    name, text = type(model).__name__, text_config(model.config)
    why = None
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        why = "some of its layers see chunks, which a step of decoding does not know"
    elif getattr(text, "num_kv_shared_layers", 0):
        why = "some of its layers read the keys of others"
    elif model.base_model is model or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        why = "it takes no logits_to_keep, and of a long prompt only the last logits are computed"
    if why is not None:
        raise ValueError(
            f"{name} keeps no cache over a ring, for {why}: generate outside of sequence_parallel, after "
            'model.set_attn_implementation("sdpa")'
        )


def last_tokens(hidden: Tensor, positions: Tensor, lengths: Tensor, keep: int) -> Tensor:
    """Return [batch, keep, dim], the hidden states of the last ``keep`` tokens of each row.

    ``hidden`` [batch, local, dim] is at ``positions``, and ``lengths`` int [batch] are the ends of the rows. The result is 0 for
    tokens that this rank does not hold, and for those before the beginning of a short row.
    """
    wanted = lengths[:, None] - keep + torch.arange(keep, device=lengths.device)
    here = (positions[..., None] == wanted[:, None]) & (positions >= 0)[..., None]
    rows = torch.arange(len(hidden), device=hidden.device)[:, None]
    return torch.where(here.any(1)[..., None], hidden[rows, here.int().argmax(1)], 0)
