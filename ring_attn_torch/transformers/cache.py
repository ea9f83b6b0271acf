"""transformers' Cache whose keys and values are spread over a ring."""

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
from .models import text_config
from .whole import Ring

PAGE = 256
"""By how many tokens a rank the cache grows, at least."""

NAMES = "cache", "past_key_values"
"""Names of the argument that carries a cache: the first since transformers 5.24, the second before."""


def cache_name(model: PreTrainedModel) -> str:
    """Return the name of the argument of ``model`` that carries a cache."""
    for interface in (model.forward, masking_utils.create_causal_mask):
        parameters = inspect.signature(interface).parameters
        for name in NAMES:
            if name in parameters:
                return name
    return NAMES[-1]


def with_cache_renamed(model: PreTrainedModel, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments ``given`` of a call, with a cache under the name that ``model`` has for it.

    Raise ValueError if it is there under both names.
    """
    names = [name for name in NAMES if name in given]
    if len(names) > 1:
        raise ValueError(f"the call has a cache and past_key_values, two names of one argument: pass {cache_name(model)} alone")
    renamed = {cache_name(model) if name in names else name: x for name, x in given.items()}
    return renamed


class RingCache(Cache):
    """What ``model.generate()`` keeps inside ``sequence_parallel``: a :class:`KVCache`, made when the first layer has its keys.

    A call with ``use_cache=True``, or with the empty DynamicCache that ``generate`` makes, returns one as ``cache``
    (``past_key_values`` before transformers 5.24), and the next call takes it from there. ``tokens`` counts the tokens of a
    row, padding on the left included, as transformers counts them; the KVCache has none for padding.
    """

    def __init__(self, ring: Ring, layers: int) -> None:
        super().__init__(layers=[])
        self.ring, self.depth, self.tokens = ring, layers, 0
        self.kv: KVCache | None = None
        self.inside = False
        """Whether a call inside sequence_parallel goes on from it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RingCache:
        """Return a cache of the same tokens on the same ring, whose group cannot be copied."""
        memo[id(self.ring)] = self.ring
        other = copy.copy(self)
        vars(other).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items()})
        return other

    def holding(self, k: Tensor, v: Tensor, tokens: int) -> KVCache:
        """The KVCache, made for k and v [batch, tokens, kv_heads, dim] like these, with room for ``tokens`` more of each row."""
        if self.kv is None:
            sizes = CacheSizes(self.depth, k.shape[2], k.shape[3], v.shape[3])
            at = {"page": PAGE, "group": self.ring.group, "device": k.device}
            self.kv = KVCache.make(sizes, len(k), tokens, dtype=k.dtype, **at)
        elif max(self.kv.ledger.lengths) + tokens > self.kv.spec.slots * self.ring.ranks:
            self.kv.reserve(max(tokens, self.tokens // 8))
        return self.kv

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are: attention itself puts them into the cache.

        ValueError outside of ``sequence_parallel``, where a model would attend to the new tokens alone.
        """
        if not self.inside:
            raise ValueError(
                "this is the cache of a ring, of which every rank has a part: call the model inside sequence_parallel, or begin "
                "without a cache"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a row has, padding included."""
        return self.tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the tokens of a call, from 0 on: masks are those of its own tokens, and attention counts from what is cached."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the cache grows."""
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer is linear attention, which none is: generate() then counts the cached tokens."""
        return [False] * self.depth

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens of every row back, as speculative decoding does with rejected ones: -n takes n tokens.

        A number above 0 is, as in transformers 5.13 and 5.14, how many tokens stay.
        """
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.tokens - tokens_to_remove)
        if removed and self.kv is not None:
            self.kv.rollback((self.kv.lengths - removed).clamp(min=0))
            self.tokens = max(0, self.tokens - removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from what row ``beam_idx[i]`` has, as beam search does."""
        if self.kv is not None:
            self.kv.fork(beam_idx.tolist(), list(range(len(beam_idx))))

    def reset(self) -> None:
        """Forget all tokens."""
        self.kv, self.tokens = None, 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        """ValueError: rows are repeated before their prompts are read."""
        raise ValueError("a cache on a ring keeps its number of rows: repeat the rows of input_ids, then generate")

    def batch_select_indices(self, indices: Tensor) -> None:
        """ValueError: a finished row stays."""
        raise ValueError("a cache on a ring keeps its number of rows: generate from the rows that you want, without it")


def cache_of(model: PreTrainedModel, ring: Ring, given: dict[str, Any]) -> RingCache | None:
    """The cache of a call with the arguments ``given``, a new one for its first call, None where it asks for none.

    ValueError, by name, for a model that cannot keep one, and for caches of other kinds.
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
    """[batch, keep, dim]: of hidden states [batch, local, dim] at ``positions`` those of the last ``keep`` tokens of each row.

    0 for tokens that this rank does not hold, and for such as there are none. ``lengths`` int [batch]: where the rows end.
    """
    wanted = lengths[:, None] - keep + torch.arange(keep, device=lengths.device)
    here = (positions[..., None] == wanted[:, None]) & (positions >= 0)[..., None]
    rows = torch.arange(len(hidden), device=hidden.device)[:, None]
    return torch.where(here.any(1)[..., None], hidden[rows, here.int().argmax(1)], 0)
