"""The forward pass of a RingTransformer for new tokens and prompts, with its keys and values in a sharded cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ring_attn_core.cache import checks
from ring_attn_core.layouts import padded_local
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.generation import check_ids, features_of, windows_of
from ring_attn_core.model.mixers import check_mixers_call, places
from ring_attn_core.validation import is_integer, is_traced

from ..axes import ring_size
from ..data.extents import on_host
from ..data.layout import to_layout
from .cache import KVCache, chunk_step
from .prefill import prefill
from .rank_model import Decoder, OnRank, RankModel, is_on, program_of, specs_of
from .requests import Lengths
from .states import States, mix_chunk, mix_tokens
from .step import DecodeStep
from .tree_attention import tree_attention_decode

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Attend = Callable[[Any, int, jax.Array, jax.Array, jax.Array], jax.Array]
"""A function ``attend(attention, layer, q, k, v)`` that returns the output of a layer's attention; ``layer`` is the cache's."""

Mix = Callable[[Any, str, int, jax.Array], jax.Array]
"""A function ``mix(mixer, name, layer, x)`` that returns the output of a recurrent layer, and keeps its states."""


def decode_step(
    model: Decoder,
    ids: Int[Array, "batch tokens"],
    cache: KVCache,
    *,
    valid: Bool[Array, "batch tokens"] | None = None,
) -> tuple[Float[Array, "batch tokens vocab"], KVCache]:
    """Append a few tokens to every request in the cache. Return their logits and the cache.

    ``model``: a RingTransformer. If it has no ``mesh``, call this inside ``jax.shard_map`` over its axis. ``ids``: the tokens,
    the same on every rank. ``cache``: made for ``model.config`` over the model's ring, in the model's compute dtype or float8.
    Its window is None or at least the widest window of a layer. ``valid``: True for real tokens. Other tokens may be anywhere in
    a row; they are not cached, and their logits are undefined. Each rank attends to its part of the cache, and all ranks
    return the same logits. Dropout is off. Outside jax.jit a step copies the cache; inside, with the cache donated, it does not.

    The logits equal those of the model on the whole sequence up to rounding: sums are computed in another order, and a float8
    cache rounds keys and values. To check for room, call ``cache.check_room`` before.

    Raise ValueError if the ids or the cache do not fit the model, or if a layer's mask is neither causal nor a sliding window of
    earlier tokens. Raise it too if the model has both a mesh and a ``head_axis``, if a weight is sharded in another way than over
    the model's mesh, or if an id is outside the vocabulary (a traced id gives NaN instead).
    """
    _check(model, ids, cache)
    return _on_ring(decode_tokens, model, cache, (ids, valid))


def prefill_prompts(
    model: Decoder,
    ids: Int[Array, "batch tokens"],
    cache: KVCache,
    lengths: Lengths | None = None,
    *,
    fresh: bool = False,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Append one chunk of a prompt to each request in the cache. Return the logits of each chunk's last token, and the cache.

    ``ids``: the global chunk in natural order, the same on every rank; each rank shards it in the model's layout. The chunk
    continues the cached tokens of each request, so a prompt may be passed in several chunks. ``lengths``: the number of tokens in
    each row without the padding at its end; None: no padding. The logits are the same on every rank, and undefined for a row of
    padding only. ``fresh``: the caller asserts that all requests are empty, so attention skips the cache; this is not checked.

    Raise ValueError as :func:`decode_step` does. Raise it too if ``lengths`` do not fit, or if the model has ALiBi and ``fresh``
    is False.
    """
    _check(model, ids, cache)
    counts, longest = ids.shape[1] if lengths is None else lengths, ids.shape[1]
    if isinstance(counts, list | tuple) and any(map(is_traced, counts)):  # an argument of jit
        counts = jnp.stack(counts)
    known = counts if isinstance(counts, int | list | tuple) else on_host(counts)
    if known is not None:
        rows = known if isinstance(known, int | list | tuple) else known.tolist()
        rows = [rows] * len(ids) if is_integer(rows) else rows
        row_counts = checks.check_lengths(rows, ids.shape[0], ids.shape[1], "what ids hold")
        if isinstance(counts, list | tuple):
            counts, longest = jnp.asarray(counts, jnp.int32), max(row_counts, default=0)
    equal, each = (counts, None) if isinstance(counts, int) else (None, counts)
    return _on_ring(_Prompted(equal, longest, bool(fresh)), model, cache, (ids, each))


def _on_ring(function: OnRank, model: Decoder, cache: KVCache, new: tuple[Any, ...]) -> Any:
    """Call ``function(rank_model, cache, new)`` in a new shard_map if the model has a mesh, else in the caller's shard_map.

    Outside of jit, equal functions of equal models compile once; inside, each is traced, because the model may have changed.
    """
    from flax import nnx

    if model.ring.mesh is None:
        return function(RankModel(model), cache, new)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    kept = _is_hashable(graph) and not isinstance(jnp.zeros(()), Tracer)
    make = program_of if kept else program_of.__wrapped__
    return make(function, graph, tree, model.ring.mesh, specs_of(leaves))(tuple(leaves), cache, new)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def decode_tokens(model: RankModel, cache: KVCache, new: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, KVCache]:
    """Return the logits and the cache of ``decode_step``, inside shard_map. ``new``: (ids, mask of real tokens or None)."""
    ids, valid = new
    step = cache.step(ids.shape[1], valid=valid)

    def attend(attention: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal cache
        cache = cache.append(layer, k, v, step)
        part = cache.part(layer, step)._asdict()
        backend = attention.ring.backend if attention.ring.backend in ("blockwise", "triton") else "auto"
        options = features_of(attention, q)
        return tree_attention_decode(q, **part, q_positions=step.positions, **options, backend=backend, axis_name=cache.axis_name)

    def mix(mixer: Any, name: str, layer: int, x: jax.Array) -> jax.Array:
        out, states = mix_tokens(mixer, name, cache.states[layer], valid, x)
        after.append(states)
        return out

    after: list[States] = []
    hidden = _through(model, ids, step, attend, mix)
    return logits_of(model, hidden), replace(cache.advance(step), states=tuple(after))


@dataclass(frozen=True)
class _Prompted:
    """The function that :func:`prefill_prompts` calls inside shard_map. ``equal``: every request's length, or None."""

    equal: int | None
    longest: int
    fresh: bool

    def __call__(self, model: RankModel, cache: KVCache, new: tuple[jax.Array, Any]) -> tuple[jax.Array, KVCache]:
        """Return the logits of each chunk's last token, and the cache. ``new``: the pair (ids, lengths or None)."""
        ids, lengths = new
        hidden, cache = last_hidden(model, cache, ids, lengths if self.equal is None else self.equal, self.fresh, self.longest)
        return logits_of(model, hidden), cache


def last_hidden(
    model: RankModel, cache: KVCache, ids: jax.Array, lengths: Lengths, fresh: bool, longest: int
) -> tuple[jax.Array, KVCache]:
    """Return the last block's output [batch, dim] for each request's last token in ``ids`` (0 without one), and the cache.

    Call it inside shard_map. ``longest``: no request has more tokens in the chunk.
    """
    ring, axis = model.model.ring, cache.axis_name
    ranks = cache.spec.ranks
    local = padded_local(ring.layout, ranks, ids.shape[1])
    step = chunk_step(cache, local, ring.layout, lengths, None, fresh, longest)

    def attend(attention: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal cache
        out, cache = prefill(
            q, k, v, cache, layer, step, **features_of(attention, q), strategy=ring.strategy, backend=ring.backend
        )
        return out

    def mix(mixer: Any, name: str, layer: int, x: jax.Array) -> jax.Array:
        out, states = mix_chunk(mixer, name, cache.states[layer], axis, step, x)
        after.append(states)
        return out

    after: list[States] = []
    whole = to_layout(ids, ring.layout, ranks)
    mine = lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * local, local, 1)
    hidden = _through(model, mine, step, attend, mix)
    here = (step.positions == step.lengths[:, None] - 1) & (step.positions >= 0)
    last = jnp.take_along_axis(hidden, here.argmax(1)[:, None, None], 1)[:, 0]
    last = lax.psum(jnp.where(here.any(1)[:, None], last, 0), axis)
    return last, replace(cache.advance(step), states=tuple(after))


def _through(model: RankModel, ids: jax.Array, step: DecodeStep, attend: Attend, mix: Mix) -> jax.Array:
    """Run the blocks on ``ids`` [b s] by ``attend`` and, in recurrent layers, ``mix``. Return [b s dim]."""
    config = model.model.config
    with model.gathered(("embed",), ids):
        x = model.model.embedded(ids)
    for number, (block, (name, layer)) in enumerate(zip(model.model.blocks, places(config.mixers, config.depth), strict=True)):
        mixer = block.attention
        if name == "attention":
            inner = partial(mixer.attended, partial(attend, mixer, layer), positions=step.positions)
        else:
            inner = partial(mix, mixer, name, layer)
        with model.gathered(("blocks", number), x):
            x = block.through(x, inner)
    return x


def logits_of(model: RankModel, hidden: jax.Array) -> jax.Array:
    """Return the logits [..., vocab] of the last block's output [..., dim]."""
    head = "embed" if model.model.head is None else "head"
    with model.gathered(("norm",), hidden), model.gathered((head,), hidden):
        return model.model.logits(model.model.norm(hidden))


def computes_in(model: Decoder) -> str:
    return str(model.compute_dtype or model.embed.embedding[...].dtype)


def check_model(model: Decoder, traced: bool = False) -> None:
    """Raise ValueError if the type, masks or sharding of ``model`` prevent decoding, or inside jit unless ``traced`` is True."""
    from flax import nnx

    if not isinstance(getattr(model, "config", None), TransformerConfig):
        raise ValueError(f"model must be a RingTransformer, got {type(model).__name__}: of a wrapped one pass what is inside")
    windows_of(model.config)
    checks.check_order(model.ring.order)
    check_mixers_call(model.config.mixers, model.ring.layout, 1 if model.ring.sharded is None else model.ring.sharded.ranks)
    weights = nnx.to_flat_state(nnx.state(model, nnx.Param))
    if not traced and any(isinstance(x, Tracer) for x in (jnp.zeros(()), *(p.get_value() for _, p in weights))):
        raise ValueError(
            "generate looks at tokens on the host and compiles its own step, and here it is traced: call it outside of jit. "
            "Inside of jit there are decode_step and prefill_prompts"
        )
    if model.ring.mesh is not None and model.ring.head_axis is not None:
        raise ValueError(
            f"head_axis={model.ring.head_axis!r} splits heads over devices (tensor parallelism), and generation computes with "
            "whole weights on every device: make the model without it, with save_weights and load_weights"
        )
    for path, p in weights:
        if not is_on(model.ring.mesh, p.get_value()):
            raise ValueError(
                f"{'.'.join(map(str, path))} is sharded over devices in another way than by a jax.NamedSharding over the model's "
                "mesh, and generation gathers weights over that mesh only: put the model's state there, or make the model with "
                "mesh=, that of its weights"
            )


def _check(model: Decoder, ids: Any, cache: KVCache) -> None:
    check_model(model, traced=True)
    checks.check_cache(cache, KVCache)
    checks.check_model(cache.spec, model.config, computes_in(model), windows_of(model.config))
    axis, where = model.ring.axis_name, model.ring.sharded
    instead = "make it and the cache with mesh=, of one device where there is but one"
    ranks = ring_size(axis, "a model without a mesh", instead) if where is None else where.ranks
    if (axis, ranks) != (cache.axis_name, cache.spec.ranks):
        raise ValueError(
            f"the model's ring is {ranks} ranks along {axis!r}, and the cache's {cache.spec.ranks} along {cache.axis_name!r}: "
            "make both with one mesh and axis_name"
        )
    checks.check_ids(ids, cache.spec.batch, hasattr(ids, "dtype"))
    known = on_host(ids)
    if known is not None:
        check_ids([int(known.min()), int(known.max())], model.config.vocab, "ids hold")
