"""Prefill attention: a chunk of prompts attends to itself round the ring, and to the cached tokens of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.cache import checks
from ring_attn_core.masks import causal, full, sliding_window
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Run

from ..attend.state import State, rest_of
from ..axes import ring_size, vary_alike
from ..block import block_state
from ..call.autograd import OpInputs, round_the_ring
from ..call.decide import compile_call
from ..call.prepare import Arrays, problem_of
from ..ring.transfer import to_ranks
from .cache import KVCache
from .global_order import in_global_order
from .scales import restore
from .step import DecodeStep, shards

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def prefill(
    q: Float[Array, "batch seq_local heads head_dim"],
    k: Float[Array, "batch seq_local kv_heads head_dim"],
    v: Float[Array, "batch seq_local kv_heads v_dim"],
    cache: KVCache,
    layer: int,
    step: DecodeStep,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    strategy: str = "auto",
    order: str = "ring",
    length: int | None = None,
    backend: str = "auto",
) -> tuple[jax.Array, KVCache]:
    """Compute causal attention of this rank's shard of a chunk over the chunk and the cache. Append the shard's k and v.

    ``step``: the result of ``cache.prefill_step(tokens, layout, lengths)``. q, k and v belong to the tokens at
    ``step.positions``. A chunk continues the cached tokens of each request. So a prompt in several chunks gives the result of the
    whole prompt, up to the order of sums and, in a float8 cache, the rounding of earlier chunks.

    Each rank caches its own k and v. The chunk attends to itself by ring attention. Cached keys are not sent. Instead all ranks
    gather the chunk's q, which is small beside the cache, and each attends to its part of the cache. An all-to-all returns each
    (out, lse) to the rank of its queries, where the pairs are merged in rank order. If ``step.fresh``, attention skips the cache.

    ``window``: the number of positions before its own that a query sees; None: the window of the cache. ``order``: with "global"
    out has the bits of ``ring_attention(..., order="global")`` over a sequence of ``length`` tokens, in chunks of any size; all
    ranks gather all cached keys (``docs/order.md``), and out is NaN at positions from ``length`` on. In ``order="ring"``
    ``alibi_slopes`` need ``step.fresh``. Other arguments: see ``ring_attention``.

    Return out [batch, seq_local, heads, v_dim] in q's dtype, 0 for padding, and the cache with the layer's new k and v, as from
    ``cache.append``. Raise ValueError at trace time if an argument does not fit. For inference: not differentiable.
    """
    window = checks.check_window(cache.spec, window)
    checks.check_chunk(step.layout)
    checks.check_whole(cache.spec, order, length, 0 if step.ragged else step.length)
    if order == "ring" and alibi_slopes is not None and not step.fresh:
        raise ValueError(
            "alibi_slopes and a request that has tokens already: what is cached lies in no order that ALiBi could count in. "
            "Prefill such a prompt whole, into empty requests, with fresh=True"
        )
    checks.check_new(cache.spec, (len(step.chunk), step.tokens), (k.shape, v.shape), (str(k.dtype), str(v.dtype)))
    arrays = Arrays(None, step.positions >= 0 if step.ragged else None, sinks, alibi_slopes)
    options = Options(
        layout=step.layout if order == "ring" else "contiguous",  # type: ignore[arg-type]  # checked above
        mask=causal() if window is None else sliding_window(window),
        length=step.length if length is None else length,
        scale=scale,
        softcap=softcap,
        strategy=strategy,
        order=order,
        backend=backend,
    )
    if order == "global":
        out, new = in_global_order(q, (k, v), cache, layer, step, arrays._replace(key_mask=None), options)
        return out, cache.append(layer, *new, step)
    decision = compile_call(problem_of(q, k, v, arrays, ring_size(cache.axis_name), options), any_position=False)
    total = None
    new = k, v
    if not step.fresh:
        total = _over_cached(q, cache, layer, step, options)
        total, new = lax.optimization_barrier((total, new))  # read the layer before it is written, in place
        total = total if sinks is None else _with_sinks(total, sinks)
    written = cache.append(layer, new[0], new[1], step)
    arrays = arrays if step.fresh else arrays._replace(sinks=None)  # sinks count once: with the chunk or the cached keys
    inputs, total = vary_alike((cache.axis_name,), OpInputs.of(q, k, v, arrays), total)
    out, *_ = round_the_ring(inputs, decision, cache.axis_name, total)
    if step.ragged:
        out = jnp.where((step.positions < 0)[..., None, None], jnp.zeros((), out.dtype), out)
    return out, written


def _over_cached(q: jax.Array, cache: KVCache, layer: int, step: DecodeStep, options: Options) -> State:
    """Return the State of this rank's queries over the keys that any rank cached before the step, in at least float32."""
    axis, ranks = cache.axis_name, cache.spec.ranks
    batch, local, heads, _ = q.shape
    queries = lax.all_gather(q, axis, axis=1, tiled=True)
    k, v, extents = _in_order(cache, layer, step, options.mask.hi)
    k = restore(k, cache.k_scale[layer], q.dtype) if cache.spec.float8 else k
    v = restore(v, cache.v_scale[layer], q.dtype) if cache.spec.float8 else v
    in_block = Options(layout="contiguous", mask=full(), scale=options.scale, softcap=options.softcap, backend=options.backend)
    runs = Run(0, queries.shape[1]), Run(0, k.shape[1])
    out, *lse = block_state(queries, k, v, Arrays(extents), in_block, runs).arrays
    packed = jnp.concatenate([out, jnp.stack(lse, -1)], -1).reshape(batch, ranks, local, heads, -1).swapaxes(0, 1)
    mine = to_ranks(packed, axis)
    width = out.shape[-1]
    return _merge(State(mine[..., :width], *(mine[..., width + i] for i in range(len(lse)))))


def _in_order(cache: KVCache, layer: int, step: DecodeStep, window: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return this rank's cached k and v by position, and int32 [b, queries, 2]: the sorted keys [first, end) of each query."""
    spec, rank = cache.spec, lax.axis_index(cache.axis_name)
    pick = lambda x: x if step.rows is None else x[step.into[:, 0]]
    k, v, positions, count = pick(cache.k[layer]), pick(cache.v[layer]), pick(cache.positions), pick(cache.counts)[:, rank, None]
    slot = jnp.arange(spec.slots, dtype=jnp.int32)[None]
    if spec.window is None:
        end = count.clip(max=spec.slots)
        positions = jnp.where(slot < count, positions, jnp.iinfo(jnp.int32).max)
    else:  # the next slot has the oldest token; empty slots come first
        end = jnp.full_like(count, spec.slots)
        oldest_first = (count + slot) % spec.slots
        rows = jnp.arange(len(count))[:, None]
        k, v, positions = k[rows, oldest_first], v[rows, oldest_first], positions[rows, oldest_first]
    place = shards(step.layout, spec.ranks, step.tokens)[0].reshape(1, -1)  # type: ignore[arg-type]
    first = jnp.zeros((len(count), place.size), jnp.int32)
    if window is not None:
        first = _first_of(positions, jnp.maximum(step.before[:, None] + place - window, 0))
    elif spec.window is not None:
        first = _first_of(positions, first)
    real = (place < step.chunk[:, None])[..., None]
    return k, v, jnp.where(real, jnp.stack([first, jnp.maximum(end, first)], -1), 0)


def _first_of(positions: jax.Array, lowest: jax.Array) -> jax.Array:
    """Return int32 [b, queries]: the index of the first of the sorted ``positions`` [b, slots] that is at least ``lowest``."""
    positions, lowest = vary_alike((), positions, lowest)
    return jax.vmap(jnp.searchsorted)(positions, lowest).astype(jnp.int32)


def _merge(parts: State) -> State:
    """Merge, in order, the States of the same queries over disjoint sets of keys, stacked along dimension 0."""
    out, lse, rest = parts
    top = lse.max(0)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(lse - top[None] if rest is None else lse - top[None] + rest)
    z, total = jnp.zeros_like(top), jnp.zeros_like(out[0])
    for rank in range(len(out)):
        z = z + weights[rank]
        total = total + weights[rank][..., None] * out[rank]
    after = top + jnp.log(z)
    return State(total / jnp.where(z == 0, 1, z)[..., None], after, None if rest is None else rest_of(top, jnp.log(z), after))


def _with_sinks(total: State, sinks: jax.Array) -> State:
    """Merge the attention sinks into (out, lse) of ``total``: head h gets one more key, with value 0 and score ``sinks[h]``."""
    lse = jnp.broadcast_to(sinks.astype(total.lse.dtype)[None, None], total.lse.shape)
    sink = State(jnp.zeros_like(total.out), lse, None if total.rest is None else jnp.zeros_like(total.rest))
    return _merge(jax.tree.map(lambda *both: jnp.stack(both), total, sink))
