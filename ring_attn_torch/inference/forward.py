"""The forward pass of a RingTransformer for new tokens and prompts, with its keys and values in a sharded cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ring_attn_core.cache import checks
from ring_attn_core.layouts import padded_local
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.generation import check_ids, features_of, windows_of
from ring_attn_core.model.mixers import check_mixers_call, places
from ring_attn_core.validation import is_integer

from ..call.autograd import no_autocast
from ..call.prepare import dtype_name
from ..data.layout import to_layout
from ..ring.agreement import AgreedCall, agree_on, device_type, same_error
from ..ring.groups import Group, is_dtensor, rank_in, ranks_of, ring_of
from .cache import KVCache
from .merge import sum_over_ranks
from .prefill import prefill
from .requests import Lengths
from .states import States, mix_chunk, mix_tokens
from .step import DecodeStep
from .tree_attention import tree_attention_decode

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Attend = Callable[[Any, int, Tensor, Tensor, Tensor], Tensor]
"""A function ``attend(attention, layer, q, k, v)`` that returns the output of a layer's attention; ``layer`` is the cache's."""

Mix = Callable[[Any, str, States, Tensor], tuple[Tensor, States]]
"""A function ``mix(layer, name, states, x)`` that returns the output of a recurrent layer, and its states after the tokens."""


class Decoder(Protocol):
    """The parts of a RingTransformer that inference uses; the layers, which stand above inference, import it."""

    config: TransformerConfig
    ring: Any
    compute_dtype: Any
    embed: Any
    blocks: Any
    norm: Any

    def embedded(self, ids: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def named_parameters(self) -> Any: ...


def decode_step(
    model: Decoder,
    ids: Int[Tensor, "batch tokens"],
    cache: KVCache,
    *,
    valid: Bool[Tensor, "batch tokens"] | None = None,
) -> tuple[Float[Tensor, "batch tokens vocab"], KVCache]:
    """Append a few tokens to every request in the cache. Return their logits and the cache.

    ``model``: a RingTransformer. ``ids``: the tokens, the same on every rank. ``cache``: made for ``model.config`` over the
    model's ring, in the model's compute dtype or float8. Its window is None or at least the widest window of a layer. ``valid``:
    True for real tokens. Other tokens may be anywhere in a row; they are not cached, and their logits are undefined.
    Each rank attends to its part of the cache, and all ranks return the same logits. Dropout and torch.autocast are off, and
    torch.compile does not compile this function.

    The logits equal those of the model on the whole sequence up to rounding: sums are computed in another order, and a float8
    cache rounds keys and values. Raise ValueError and leave the cache unchanged if the cache does not fit the model or is full,
    if a layer's mask is neither causal nor a sliding window of earlier tokens, if weights are split over ranks, or if an id is
    outside the vocabulary (not checked on a GPU). After a first call a CUDA graph may capture the call: ``docs/cache.md``.
    """
    return _as_it_stands(_decode_tokens)(model, ids, cache, valid)


def _decode_tokens(model: Decoder, ids: Tensor, cache: KVCache, valid: Tensor | None) -> tuple[Tensor, KVCache]:
    _agree("decode_step", model, ids, cache)
    with torch.no_grad(), no_autocast(ids.device.type):
        step = cache.step(ids.shape[1], valid=valid)

        def attend(attention: Any, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.append(layer, k, v, step)
            part = cache.part(layer, step)._asdict()
            backend = attention.ring.backend if attention.ring.backend in ("blockwise", "triton") else "auto"
            options = features_of(attention, q)
            return tree_attention_decode(q, **part, q_positions=step.positions, **options, backend=backend, group=cache.group)

        mix = lambda mixer, name, states, x: mix_tokens(mixer, name, states, valid, x)
        return logits_of(model, _through(model, ids, cache, step, attend, mix)), cache


def prefill_prompts(
    model: Decoder,
    ids: Int[Tensor, "batch tokens"],
    cache: KVCache,
    lengths: Lengths | None = None,
    *,
    fresh: bool = False,
) -> tuple[Float[Tensor, "batch vocab"], KVCache]:
    """Append one chunk of a prompt to each request in the cache. Return the logits of each chunk's last token, and the cache.

    ``ids``: the global chunk in natural order, the same on every rank; each rank shards it in the model's layout. The chunk
    continues the cached tokens of each request, so a prompt may be passed in several chunks. ``lengths``: the number of tokens in
    each row without the padding at its end; None: no padding. The logits are the same on every rank, and undefined for a row of
    padding only. ``fresh``: if True, check that all requests are empty.

    Raise ValueError as :func:`decode_step` does, or if a length is below 0 or above the size of the chunk. Also raise it if a
    request already has tokens and ``fresh`` is True or the model has ALiBi.
    """
    return _as_it_stands(_prefill_prompts)(model, ids, cache, lengths, fresh)


def _prefill_prompts(model: Decoder, ids: Tensor, cache: KVCache, lengths: Lengths | None, fresh: bool) -> tuple[Tensor, KVCache]:
    _agree("prefill_prompts", model, ids, cache)
    with torch.no_grad(), no_autocast(ids.device.type):
        hidden = last_hidden(model, ids, cache, lengths, fresh=fresh)
        return logits_of(model, sum_over_ranks(hidden, cache.ring)), cache


def _as_it_stands(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude ``function`` from torch.compile, since it updates host state of the cache and ranks compare its arguments."""
    if not torch.compiler.is_compiling():
        return function  # avoids the import of torch._dynamo, which takes a second
    return torch.compiler.disable(function, reason="decode_step and prefill_prompts run as they stand: call them outside")


def last_hidden(model: Decoder, ids: Tensor, cache: KVCache, lengths: Lengths | None = None, *, fresh: bool = False) -> Tensor:
    """Return the last block's output [batch, dim] for each request's last token; 0 if this rank's part of ``ids`` lacks it."""
    ring = model.ring
    ranks = ranks_of(cache.ring)
    counts = ids.shape[1] if lengths is None else lengths
    with same_error(cache.ring):  # the other ranks exchange their lengths in prefill_step
        host_counts = counts.tolist() if isinstance(counts, Tensor) else counts
        checks.check_lengths(
            [host_counts] * len(ids) if is_integer(host_counts) else host_counts, ids.shape[0], ids.shape[1], "what ids hold"
        )
    step = cache.prefill_step(padded_local(ring.layout, ranks, ids.shape[1]), ring.layout, counts, fresh=fresh)

    def attend(attention: Any, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return prefill(q, k, v, cache, layer, step, **features_of(attention, q), strategy=ring.strategy, backend=ring.backend)[0]

    mine = to_layout(ids, ring.layout, ranks).chunk(ranks, 1)[rank_in(cache.ring)]
    mix = lambda mixer, name, states, x: mix_chunk(mixer, name, states, cache, step, x)
    hidden = _through(model, mine, cache, step, attend, mix)
    here = (step.positions == step.lengths[:, None] - 1) & (step.positions >= 0)
    last = hidden[torch.arange(len(hidden), device=hidden.device), here.int().argmax(1)]
    return torch.where(here.any(1)[:, None], last, 0)


def _through(model: Decoder, ids: Tensor, cache: KVCache, step: DecodeStep, attend: Attend, mix: Mix) -> Tensor:
    """Run the blocks on ``ids`` [b s] by ``attend`` and, in recurrent layers, ``mix``; advance the cache. Return [b s dim]."""
    x, turns, after = model.embedded(ids.long()), {}, []

    def recurrent(mixer: Any, name: str, layer: int, x: Tensor) -> Tensor:
        out, states = mix(mixer, name, cache.states[layer], x)
        after.extend(states)
        return out

    for block, (name, layer) in zip(model.blocks, places(model.config.mixers, model.config.depth), strict=True):
        if name == "attention":
            x = block.over_cache(x, step.positions, partial(attend, block.attention, layer), turns)
        else:
            x = block.through(x, partial(recurrent, block.attention, name, layer))
    cache.advance(step)
    for kept, new in zip(chain(*cache.states), after, strict=True):
        kept.copy_(new)
    return x


def logits_of(model: Decoder, hidden: Tensor) -> Tensor:
    return model.logits(model.norm(hidden))


def computes_in(model: Decoder) -> str:
    return dtype_name(model.compute_dtype or model.embed.weight.dtype)


def check_model(model: Decoder) -> None:
    if not isinstance(getattr(model, "config", None), TransformerConfig):
        raise ValueError(f"model must be a RingTransformer, got {type(model).__name__}: of a wrapped one pass what is inside")
    windows_of(model.config)
    checks.check_order(model.ring.order)
    check_mixers_call(model.config.mixers, model.ring.layout, ranks_of(ring_of(model.ring.group)))
    for name, p in model.named_parameters():
        if is_dtensor(p):
            raise ValueError(
                f"{name} is a DTensor, split over ranks by FSDP or tensor parallelism, and generation needs whole weights "
                "on every rank: load them into a model that is not split, with save_weights and load_weights"
            )


def _agree(call: str, model: Decoder, ids: Any, cache: Any) -> None:
    """Raise ValueError if model, ids and cache do not fit together, on all ranks at the first call with a shape of ids."""
    shape = tuple(ids.shape) if isinstance(ids, Tensor) else ()
    agree_on(AgreedCall(call, device_type(ids), (("ids_shape", shape),)), _ring(model, cache), lambda: _check(model, ids, cache))


def _ring(model: Decoder, cache: Any) -> Group:
    if isinstance(cache, KVCache):
        return cache.ring
    return ring_of(model.ring.group) if isinstance(getattr(model, "config", None), TransformerConfig) else None


def _check(model: Decoder, ids: Any, cache: KVCache) -> None:
    check_model(model)
    checks.check_cache(cache, KVCache)
    checks.check_model(cache.spec, model.config, computes_in(model), windows_of(model.config))
    ranks = ranks_of(ring_of(model.ring.group))
    if ranks != cache.spec.ranks:
        raise ValueError(f"the model's ring has {ranks} ranks, and the cache {cache.spec.ranks}: make both with one group")
    checks.check_ids(ids, cache.spec.batch, isinstance(ids, Tensor))
    if ids.device.type == "cpu":
        check_ids([int(ids.min()), int(ids.max())], model.config.vocab, "ids hold")
