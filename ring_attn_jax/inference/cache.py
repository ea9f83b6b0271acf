"""A KV cache that prefill and decode steps fill. ``cache/placement.py`` of the core decides which rank stores each token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from ring_attn_core.cache import checks
from ring_attn_core.cache.placement import positions
from ring_attn_core.cache.spec import CacheSpec
from ring_attn_core.validation import is_integer

from ..axes import ring_size, vary_alike
from .requests import DATA, META, Lengths, Requests, Rows
from .scales import make_scales, of_first, quantize
from .step import CachedRequests, DecodeStep, append_chunk, append_tokens


class LayerPart(NamedTuple):
    """A layer's k [batch, slots, kv_heads, head_dim], v and scales; ``k_positions`` int32 [batch, slots], -1 if empty."""

    k: jax.Array
    v: jax.Array
    k_positions: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


@partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=META)
@dataclass(frozen=True, eq=False)
class KVCache(Requests):
    """The keys and values of a batch of requests for every layer, sharded over the ranks of a ring; see ``docs/cache.md``.

    Create one with :meth:`make`. The cache is a pytree. A slot holds one token. Arrays of this rank's slots: k [layers, batch,
    slots, kv_heads, head_dim], v [..., v_dim] and positions int32 [batch, slots], the position of the token in each slot, -1 if
    empty. Outside ``jax.shard_map`` these arrays hold the slots of all ranks, in rank order. Arrays that are equal on every rank:
        counts: int32 [batch, ranks], the number of a request's tokens that each rank has stored, overwritten tokens included.
        lengths: int32 [batch], the number of tokens of each request.
        reached: int32 [batch], a request's greatest length since its reset, including appended steps that were never advanced.
        owners: int16 [batch, n], ranks of the newest n = ``spec.remembered`` tokens; the token at position p has index p % n.
        k_scale, v_scale: float32 [layers, kv_heads], the scales of a float8 cache; 0 until they are known.
        states: of each recurrent layer the last tokens before its convolution [batch, taps - 1, channels], and its state.

    Run a step of new tokens inside ``jax.shard_map``, with ``cache.specs`` as the specs of the cache:

        step = cache.step(tokens)                       # or cache.prefill_step(...)
        for layer in range(layers):                     # q, k, v of the new tokens, at step.positions
            cache = cache.append(layer, k, v, step)     # or out, cache = prefill(q, k, v, cache, layer, step)
            ...                                         # attention over cache.part(layer, step)
        cache = cache.advance(step)

    The tokens that ``append`` writes become visible with ``advance``. If a step is not advanced, later steps do not see its
    tokens. Methods that change the cache return a new cache; donate the old cache to jit, and XLA writes in place. Call
    :meth:`rollback`, :meth:`reset`, :meth:`evict` and :meth:`fork` between steps, inside or outside of shard_map.
    """

    @classmethod
    def make(
        cls,
        config: Any,
        batch: int,
        capacity: int | None = None,
        *,
        dtype: Any = None,
        window: int | None = None,
        room: int | None = None,
        page: int | None = None,
        k_scale: jax.Array | None = None,
        v_scale: jax.Array | None = None,
        axis_name: str = "seq",
        mesh: Mesh | None = None,
    ) -> KVCache:
        """Create an empty cache for ``batch`` requests, each with at most ``capacity`` tokens on all ranks together.

        ``config``: a TransformerConfig, or ``CacheSizes(layers, kv_heads, head_dim, v_dim)``. ``dtype``: "bfloat16", "float16",
        "float32", "float64" or "float8_e4m3fn"; None for the compute dtype of a TransformerConfig, and bfloat16 for CacheSizes.

        A float8 cache divides each value by the scale of its layer and kv head, and clamps it to the largest float8 number.
        ``k_scale``, ``v_scale``: these scales, float32 [layers, kv_heads]. By default each scale is the smallest power of two
        above max |x| / 448, with the maximum over the tokens of the first completed step (1 if the maximum is 0).

        Without a window, ``capacity`` is rounded up until all ranks have equally many slots: an even number if there are several
        ranks, and whole pages if ``page`` is set. So a prompt of ``capacity`` tokens fits in every layout.

        ``window``: the number of positions before its own that a query sees. With a window a request may have any length.
        ``capacity`` is then the number of newest tokens of a request that each rank keeps: at least ``window + room``, which
        is the default. ``room`` (by default ``window``): the maximum number of tokens that a rollback removes or a step adds; a
        ``fresh`` prefill may add more. ``page`` (not with a window): the number of slots per rank by which :meth:`reserve` grows
        the cache. ``mesh``: make global arrays, sharded over the mesh axis ``axis_name``. Without a mesh, call ``make`` inside
        ``jax.shard_map`` over that axis, to make this rank's arrays. Over other axes of a mesh the cache is replicated, and every
        member computes all requests: to share requests among rings, make a mesh and a cache for each ring.

        Raise ValueError if an argument does not fit.
        """
        if mesh is not None and axis_name not in mesh.shape:
            raise ValueError(f"axis_name={axis_name!r} is not an axis of the mesh, which has {', '.join(map(repr, mesh.shape))}")
        instead = "pass mesh=, of one device where there is but one"
        ranks = ring_size(axis_name, "KVCache.make", instead) if mesh is None else mesh.shape[axis_name]
        scaled = k_scale is not None or v_scale is not None
        options: dict[str, Any] = {"window": window, "room": room, "page": page, "scaled": scaled}
        spec = CacheSpec.of(config, batch, capacity, ranks, dtype=_name(dtype), **options)
        zeros = lambda shape: jnp.zeros((batch, *shape), spec.state_dtype)
        states = tuple((zeros(conv), zeros(state)) for conv, state in spec.states)
        arrays = *_empty(spec, 1 if mesh is None else ranks), *make_scales(spec, k_scale, v_scale)
        cache = cls(*arrays, spec=spec, axis_name=axis_name, states=states)
        if mesh is None:
            k, v, where = vary_alike((axis_name,), cache.k, cache.v, cache.positions)
            return replace(cache, k=k, v=v, positions=where)
        return jax.device_put(cache, jax.tree.map(partial(NamedSharding, mesh), cache.specs))

    def step(self, tokens: int = 1, *, valid: jax.Array | None = None, rows: Rows | None = None) -> DecodeStep:
        """Return a DecodeStep with the positions and slots of ``tokens`` new tokens of each request.

        Every rank computes q, k and v of all these tokens; each token is cached on one rank. ``valid`` bool [requests, tokens],
        the same on every rank: True for real tokens; None: all. ``rows``: the requests' indices, one int or several; None: all.

        Raise ValueError if an argument does not fit. Without a window, new tokens beyond the capacity are lost without an error;
        cached tokens stay. To prevent this, call :meth:`check_room` before the step, outside of jit.
        """
        some = None if rows is None else tuple(checks.check_step_rows(rows, self.spec.batch))
        checks.check_tokens(self.spec, tokens)
        if valid is not None:
            shape, dtype = getattr(valid, "shape", ()), str(getattr(valid, "dtype", type(valid).__name__))
            checks.check_valid(shape, dtype, (self.spec.batch if some is None else len(some), tokens))
        held = self._held(some)
        meta: dict[str, Any] = {"tokens": tokens, "layout": None, "length": tokens, "fresh": False, "ragged": False, "rows": some}
        return DecodeStep(**append_tokens(held, tokens, valid), **meta, before=held.lengths)

    def prefill_step(
        self,
        tokens: int,
        layout: str = "zigzag",
        lengths: Lengths | None = None,
        *,
        rows: Rows | None = None,
        fresh: bool = False,
    ) -> DecodeStep:
        """Return a DecodeStep that adds one chunk, sharded in ``layout``, to each request. A shard has ``tokens`` tokens.

        A chunk continues the cached tokens of its request. ``lengths``: the number of tokens in each chunk without the padding at
        its end: an int for all, one int each, or integers [requests], the same on every rank; None: no padding. ``rows``: the
        requests; None: all. ``fresh``: assert, unchecked, that these requests are empty; attention then skips the cache.

        If the cache has a window and ``fresh`` is False, no chunk may have more than ``room`` tokens. The check takes the
        greatest of ``lengths`` as the size of the chunk. If ``lengths`` is an array or None, it takes the total size of all
        shards.

        Raise ValueError if an argument does not fit. To check for room, call :meth:`check_room` before, outside of jit.
        """
        return chunk_step(self, tokens, layout, lengths, rows, fresh, tokens * self.spec.ranks)

    def append(self, layer: int | jax.Array, k: jax.Array, v: jax.Array, step: DecodeStep) -> KVCache:
        """Write k [requests, tokens, kv_heads, head_dim] and v of a layer's new tokens; each rank writes the tokens it caches.

        Raise ValueError if ``layer``, shapes or dtypes do not fit.
        """
        checks.check_layer(self.spec, layer)
        checks.check_new(self.spec, (len(step.chunk), step.tokens), (k.shape, v.shape), (str(k.dtype), str(v.dtype)))
        arrays: dict[str, Any] = {}
        scales = self.k_scale[layer], self.v_scale[layer]
        if self.spec.float8 and not self.spec.scaled:
            scales = of_first(scales, (self.lengths == 0).all(), (k, v), step, self.axis_name)
            arrays = {"k_scale": self.k_scale.at[layer].set(scales[0]), "v_scale": self.v_scale.at[layer].set(scales[1])}
        for name, new, scale in (("k", k, scales[0]), ("v", v, scales[1])):
            new = new if step.source is None else jnp.take_along_axis(new, step.source[..., None, None], 1)
            new = quantize(new, scale) if self.spec.float8 else new
            kept, new, slots = vary_alike((self.axis_name,), getattr(self, name), new, step.slots)
            arrays[name] = kept.at[layer, step.into, slots].set(new, mode="drop")
        arrays["reached"] = self.reached.at[step.into[:, 0]].max(step.lengths)
        return replace(self, **arrays)

    def advance(self, step: DecodeStep) -> KVCache:
        """Make the new tokens of a step visible in the cache. Call it after ``append`` to every layer; this is not checked."""
        into = step.into
        changed = {"positions": step.k_positions, "counts": step.counts, "lengths": step.lengths}
        if step.rows is not None:
            changed = {name: getattr(self, name).at[into[:, 0]].set(x) for name, x in changed.items()}
        owners = self.owners.at[into, step.owner_slots].set(step.owners, mode="drop")
        return replace(self, owners=owners, **changed)

    def part(self, layer: int | jax.Array, step: DecodeStep | None = None) -> LayerPart:
        """Return this rank's LayerPart for all requests or, with ``step``, for the step's requests with their new tokens."""
        k, v = self.k[layer], self.v[layer]
        if step is not None and step.rows is not None:
            k, v = (x[step.into[:, 0]] for x in (k, v))
        scales = (self.k_scale[layer], self.v_scale[layer]) if self.spec.float8 else (None, None)
        return LayerPart(k, v, self.positions if step is None else step.k_positions, *scales)

    def _held(self, rows: tuple[int, ...] | None) -> CachedRequests:
        at = lambda x: x if rows is None else x[jnp.asarray(rows, jnp.int32)]
        return CachedRequests(at(self.positions), at(self.counts), at(self.lengths), self.spec, lax.axis_index(self.axis_name))


def _name(dtype: Any) -> Any:
    if dtype is None:  # jnp.dtype(None) is float64
        return None
    try:
        return str(jnp.dtype(dtype))
    except TypeError:
        return dtype


def _empty(spec: CacheSpec, ranks: int) -> list[jax.Array]:
    """Return k, v, positions, counts, lengths, reached and owners of an empty cache with the slots of 1 or all ``ranks``."""
    sizes, slots = spec.sizes, spec.slots * ranks
    heads = [(sizes.layers, spec.batch, slots, sizes.kv_heads, dim) for dim in (sizes.head_dim, sizes.v_dim)]
    keys = [jnp.zeros(shape, spec.dtype) for shape in heads]
    counts = [jnp.zeros(shape, jnp.int32) for shape in ((spec.batch, spec.ranks), spec.batch, spec.batch)]
    where = jnp.full((spec.batch, slots), -1, jnp.int32)
    return [*keys, where, *counts, jnp.zeros((spec.batch, spec.remembered), jnp.int16)]


def chunk_step(
    cache: KVCache, tokens: int, layout: str, lengths: Lengths | None, rows: Rows | None, fresh: bool, longest: int
) -> DecodeStep:
    """Return the result of ``cache.prefill_step``. If ``lengths`` is an array, no chunk has more than ``longest`` tokens."""
    some = None if rows is None else tuple(checks.check_step_rows(rows, cache.spec.batch))
    batch, most = cache.spec.batch if some is None else len(some), tokens * cache.spec.ranks
    positions(layout, cache.spec.ranks, tokens)
    length, ragged = longest, True
    if isinstance(lengths, jax.Array | np.ndarray):
        if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
            shape = f"{lengths.dtype} {list(lengths.shape)}"
            raise ValueError(f"lengths must be integers [{batch}], one for every request, got {shape}")
        chunk = jnp.clip(jnp.asarray(lengths), 0, longest).astype(jnp.int32)
    else:
        counts = most if lengths is None else lengths
        counts = [counts] * batch if is_integer(counts) else counts
        known = checks.check_lengths(counts, batch, most, "what the shards hold")
        length, ragged = max(known), len(set(known)) > 1
        chunk = jnp.asarray(known, jnp.int32)
    if not fresh:
        checks.check_tokens(cache.spec, max(1, length))
    held = cache._held(some)
    meta: dict[str, Any] = {"tokens": tokens, "layout": layout, "length": length, "fresh": fresh}
    meta |= {"ragged": ragged, "rows": some}
    return DecodeStep(**append_chunk(held, chunk, layout, tokens), **meta, before=held.lengths)
