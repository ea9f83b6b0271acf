"""Prefill attention: a chunk of prompts attends to itself round the ring, and to the cached tokens of its requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.cache import checks
from ring_attn_core.kernels.backends import VENDORS
from ring_attn_core.masks import causal, full, sliding_window
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Run

from ..attend.state import State, rest_of
from ..block import block_state
from ..call.autograd import OpCall, forward
from ..call.decide import decide
from ..call.prepare import Arrays, check_tensors, dtype_name, problem_of
from ..ring.agreement import same_error
from ..ring.groups import Group, group_name, rank_in, ranks_of
from ..ring.halo import all_gather
from .cache import KVCache
from .global_order import in_global_order
from .scales import restore
from .step import DecodeStep, shards

if TYPE_CHECKING:
    from jaxtyping import Float


def prefill(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch seq_local kv_heads head_dim"],
    v: Float[Tensor, "batch seq_local kv_heads v_dim"],
    cache: KVCache,
    layer: int,
    step: DecodeStep,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    alibi_slopes: Float[Tensor, " heads"] | None = None,
    strategy: str = "auto",
    order: str = "ring",
    length: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, KVCache]:
    """Compute causal attention of this rank's shard of a chunk over the chunk and the cache. Append the shard's k and v.

    ``step``: the result of ``cache.prefill_step(tokens, layout, lengths)``. q, k and v belong to the tokens at
    ``step.positions``. A chunk continues the cached tokens of each request. So a prompt in several chunks gives the result of the
    whole prompt, up to the order of sums and, in a float8 cache, the rounding of earlier chunks.

    Each rank caches its own k and v. The chunk attends to itself by ring attention. Cached keys are not sent. Instead all ranks
    gather the chunk's q, which is small beside the cache, and each attends to its part of the cache. An all-to-all returns each
    (out, lse) to the rank of its queries, where the pairs are merged in rank order. If ``step.fresh``, attention skips the cache.

    ``window``: the number of positions before its own that a query sees; None: the window of the cache. ``order``: with "global"
    out has the bits of ``ring_attention(..., order="global")`` over a sequence of ``length`` tokens, in chunks of any size; all
    ranks gather all cached keys (``docs/order.md``). For the other arguments see ``ring_attention``.

    Return out [batch, seq_local, heads, v_dim] in q's dtype, 0 for padding, and the cache with the layer's new k and v, as from
    ``cache.append``. Raise ValueError before any array is sent if the arguments do not fit, or in ``order="ring"`` if
    ``alibi_slopes`` are passed and a request has cached tokens. For inference: not differentiable.
    """
    ring = cache.ring
    ring_call = OpCall(Options(), group_name(cache.group))
    with same_error(ring):
        window = checks.check_window(cache.spec, window)
        ragged = len({step.length, *map(sum, step.host[1] or ())}) > 1
        arrays = Arrays(None, step.positions >= 0 if ragged else None, sinks, alibi_slopes)
        check_tensors(q, k, v, arrays, ring_call.group)
        _check(q, k, v, cache, layer, step)
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
        checks.check_whole(cache.spec, order, length, int(step.lengths.max()) if order == "global" else 0)
        if order == "ring" and alibi_slopes is not None and not step.fresh:
            raise ValueError(
                "alibi_slopes and a request that has tokens already: what is cached lies in no order that ALiBi could count in. "
                "Prefill such a prompt whole, into empty requests"
            )
    if order == "global":
        out = in_global_order(q, (k, v), cache, layer, step, arrays._replace(key_mask=None), options)
        return out, cache.append(layer, k, v, step)
    decide(problem_of(q, k, v, arrays, ranks_of(ring), options), arrays, ring, q.device)
    total = None if step.fresh else _over_cached(q, cache, layer, step, options)
    if total is not None and sinks is not None:
        total = _with_sinks(total, sinks)
    arrays = arrays if step.fresh else arrays._replace(sinks=None)  # sinks count once: with the chunk or the cached keys
    out, *_ = forward(q, k, v, arrays, ring_call._replace(options=options), total, ahead=False)
    cache.append(layer, k, v, step)  # after the attention, since a window's slots are reused
    return (out.masked_fill((step.positions < 0)[..., None, None], 0) if ragged else out), cache


def _check(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, step: DecodeStep) -> None:
    checks.check_chunk(step.layout)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("prefill has no gradient, and q, k or v requires one: call it under torch.no_grad()")
    cache.check_step(layer, step)
    shapes, dtypes = (tuple(k.shape), tuple(v.shape)), (dtype_name(k.dtype), dtype_name(v.dtype))
    checks.check_new(cache.spec, (len(step.chunk), step.tokens), shapes, dtypes)


def _over_cached(q: Tensor, cache: KVCache, layer: int, step: DecodeStep, options: Options) -> State:
    """Return the State of this rank's queries over the keys that any rank cached before the step, in at least float32."""
    ring, ranks = cache.ring, ranks_of(cache.ring)
    queries = all_gather(q, ring)
    k, v, extents = _in_order(cache, layer, step, options.mask.hi)
    k = restore(k, cache.k_scale[layer], q.dtype) if cache.spec.float8 else k
    v = restore(v, cache.v_scale[layer], q.dtype) if cache.spec.float8 else v
    backend = "auto" if options.backend in VENDORS else options.backend
    in_block = Options(layout="contiguous", mask=full(), scale=options.scale, softcap=options.softcap, backend=backend)
    runs = Run(0, queries.shape[1]), Run(0, k.shape[1])
    part = block_state(queries, k, v, Arrays(extents), in_block, runs)
    if ranks == 1:
        return part
    return _merge(State(*(_to_owners(x, ranks, ring) for x in part.arrays)))


def _to_owners(x: Tensor, ranks: int, ring: Group) -> Tensor:
    """Send each rank its queries' results in ``x`` [b ranks*local ...]; return those for this rank's, [ranks b local ...]."""
    by_rank = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(by_rank)
    dist.all_to_all_single(mine, by_rank, group=ring)
    return mine


def _in_order(cache: KVCache, layer: int, step: DecodeStep, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's cached k and v by position, and int32 [b, queries, 2]: the sorted keys [first, end) of each query."""
    spec, rank = cache.spec, rank_in(cache.ring)
    pick = lambda x: x if step.rows is None else x[step.rows]
    k, v, positions, count = pick(cache.k[layer]), pick(cache.v[layer]), pick(cache.positions), pick(cache.counts)[:, rank, None]
    slot = torch.arange(spec.slots, device=count.device, dtype=torch.int32)
    if spec.window is None:
        end = count.clip(max=spec.slots)
        positions = torch.where(slot < count, positions[:, :-1], torch.iinfo(torch.int32).max)
    else:  # the next slot has the oldest token; empty slots come first
        end = torch.full_like(count, spec.slots)
        oldest_first = ((count + slot) % spec.slots).long()
        rows = torch.arange(len(count), device=count.device)[:, None]
        k, v, positions = k[rows, oldest_first], v[rows, oldest_first], positions.gather(1, oldest_first)
    place = shards(step.layout, spec.ranks, step.tokens, count.device)[0].flatten()  # type: ignore[arg-type]
    first = torch.zeros_like(place).expand(len(count), -1)
    if window is not None:
        lowest = (step.before[:, None] + place - window).clamp(min=0)
        first = torch.searchsorted(positions.contiguous(), lowest, out_int32=True)
    elif spec.window is not None:
        first = torch.searchsorted(positions.contiguous(), torch.zeros_like(first).contiguous(), out_int32=True)
    real = place < step.chunk[:, None]
    return k, v, torch.stack([first, torch.maximum(end, first)], -1) * real[..., None]


def _merge(parts: State) -> State:
    """Merge in order the States, stacked along dimension 0, of the same queries over disjoint sets of keys."""
    out, lse, rest = parts
    top = lse.amax(0)
    top = top.masked_fill(top == -math.inf, 0)
    weights = torch.exp(lse - top if rest is None else (lse - top).add_(rest))
    z, total = torch.zeros_like(top), torch.zeros_like(out[0])
    for weight, part in zip(weights, out, strict=True):
        z = z + weight
        total.addcmul_(weight[..., None], part)  # in place: a pass over ``out`` is 1 GB for 65,536 queries of 32 heads
    after = top + z.log()
    return State(total.div_(z.masked_fill(z == 0, 1)[..., None]), after, None if rest is None else rest_of(top, z.log(), after))


def _with_sinks(total: State, sinks: Tensor) -> State:
    """Merge the attention sinks into (out, lse) of ``total``: head h gets one more key, with value 0 and score ``sinks[h]``."""
    sink = State(torch.zeros_like(total.out), sinks.to(total.lse.dtype).expand_as(total.lse))
    if total.rest is not None:
        sink = sink._replace(rest=torch.zeros_like(total.rest))
    return _merge(State(*(torch.stack(x) for x in zip(total.arrays, sink.arrays, strict=True))))
