"""Summary attention over a ring, as ``variants/summary.py`` of ring_attn_core explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import full
from ring_attn_core.problem.checks import check_array
from ring_attn_core.variants.summary import Summaries, SummaryInputs, SummaryOptions, SummaryPlan, plan_call

from ..attend.tiles import accumulation_dtype
from ..axes import describe_arrays, dtype_names, ring_size
from ..block import attend_block, merge
from ..call.autograd import attention
from ..call.prepare import Arrays
from ..sharded import ShardedAxes, check_shards, over_mesh

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


@named_keywords
def summary_attention(
    q: Float[Array, "batch seq_local heads head_dim"],
    k: Float[Array, "batch seq_local kv_heads head_dim"],
    v: Float[Array, "batch seq_local kv_heads v_dim"],
    pool: Float[Array, "summaries kv_heads head_dim"] | None = None,
    *,
    block: int,
    summaries: int = 1,
    window: int,
    axis_name: str = "seq",
    pooling: str = "attention",
    key_mask: Bool[Array, "batch seq_local"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    length: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute approximate causal attention: recent tokens exactly, and a few summaries of each earlier block.

        first(i) = block floor(max(i - window, 0) / block)      query i sees the keys first(i) <= j <= i exactly
        w_nut    = softmax over t in block n of (pool_u . k_t head_dim^-0.5)
        kbar_nu  = sum_t w_nut k_t,  vbar_nu = sum_t w_nut v_t      key and value of summary u of block n
        s_i,nu   = scale q_i . kbar_nu + log(block / summaries)     a summary counts as block / summaries tokens

    Query i also sees the summaries of all blocks before first(i). Tokens and summaries share one softmax. Every earlier token
    counts exactly once, by itself or in a summary. ``window >= length - 1`` is exact attention, and so is ``pooling="mean"`` with
    ``summaries=block``. Several language models are trained with a window and pooled blocks. Here the summaries are all-gathered.
    Under the strategy "ring", keys travel only as far as the window and one block reach.

    Arguments (arrays are this rank's shards in *contiguous* layout; positions and lengths count tokens of the global sequence):
        q, k, v: as in :func:`ring_attention`, of the same tokens.
        pool: ``[summaries, kv_heads, head_dim]``, learned, the same on each rank; zeros give the mean of the block. It is
            cast to k's dtype. Its gradient is summed over the ranks; inside ``shard_map(check_vma=False)`` it is partial.
        block: number of tokens summarized together; blocks need not end where shards do, and may be longer than shards.
        summaries: the number of summaries of a block.
        window: a query sees at least this many previous tokens exactly; the exact tokens begin at the first token of a block.
        pooling: "attention" (above), or "mean" (without ``pool``): a block is cut into ``summaries`` equal parts, and summary u
            is the mean of part u. ``block`` must then be a multiple of ``summaries``.
        key_mask: bool ``[batch, seq_local]``, True if a key may be attended. Masked keys are left out of the pooling. The
            logarithm above is then log(n / summaries), where n is the number of unmasked keys in the block. For "mean" it is
            log n, where n is the number of unmasked keys in the summary's part. A summary with n = 0 is masked. To apply this
            logarithm, each summary's values are multiplied by f, its fraction of unmasked tokens, and f is appended as one more
            column of values. The last column of the output then divides the other columns, and its logarithm is added to lse.
        axis_name, scale, softcap, length, strategy, backend, deterministic, return_lse: as in :func:`ring_attention`. softcap
            is applied before a summary's logarithm is added.

    Returns ``out``; with ``return_lse`` (out, lse), as ring_attention does. One all-gather sends the partial summaries in float32
    (float64 for float64 inputs). If a block spans several ranks, its partial summaries are merged. Merged summaries are rounded
    to k's dtype. ``ring_attn_core.variants.summary.SummaryPlan.bytes_sent`` counts the bytes sent.

    Raise ValueError at trace time if inputs do not fit. Second derivatives and forward mode are not supported.
    """
    options = SummaryOptions(
        block=block,
        window=window,
        summaries=summaries,
        pooling=pooling,
        scale=scale,
        softcap=softcap,
        length=length,
        strategy=strategy,
        backend=backend,
        deterministic=deterministic,
    )
    out, lse = attention_with_summaries(SummaryInputs(q, k, v, pool, key_mask), options, axis_name)
    return (out, lse) if return_lse else out


@named_keywords
def sharded_summary_attention(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads v_dim"],
    pool: Float[Array, "summaries kv_heads head_dim"] | None = None,
    *,
    mesh: Mesh | None = None,
    block: int,
    summaries: int = 1,
    window: int,
    axis_name: str = "seq",
    batch_axes: str | Sequence[str] = (),
    head_axis: str | None = None,
    pooling: str = "attention",
    key_mask: Bool[Array, "batch tokens"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    length: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute :func:`summary_attention`, an approximation, on global arrays in contiguous layout (natural order, padded).

    The mesh, its axes and the sharding of arrays are as in :func:`sharded_ring_attention`; ``pool`` is sharded over ``head_axis``
    like k's heads. Other arguments are those of summary_attention, but with global arrays. Raise ValueError if summary_attention
    or sharded_ring_attention would refuse an argument.
    """
    options = SummaryOptions(
        block=block,
        window=window,
        summaries=summaries,
        pooling=pooling,
        scale=scale,
        softcap=softcap,
        length=length,
        strategy=strategy,
        backend=backend,
        deterministic=deterministic,
    )
    where = ShardedAxes.of(mesh, axis_name, batch_axes, head_axis)
    return run_sharded(SummaryInputs(q, k, v, pool, key_mask), options, where, return_lse)


def attention_with_summaries(inputs: SummaryInputs, options: SummaryOptions, axis_name: str) -> tuple[jax.Array, jax.Array]:
    plan = _plan_call(inputs, options, ring_size(axis_name))
    q, k, v, _, key_mask = inputs
    first, end = _visible_range(plan, lax.axis_index(axis_name))
    extents = jnp.broadcast_to(jnp.stack([first, end], -1), (*q.shape[:2], 2)) if plan.blocks else None
    exact, exact_lse = attention(q, k, v, Arrays(extents, key_mask), plan.exact_options, axis_name)
    if not plan.blocks:
        return exact, exact_lse
    compressed = _over_summaries(q, first, _summaries(inputs, plan, axis_name), plan)
    out, lse = merge((exact.astype(exact_lse.dtype), exact_lse), compressed)
    return out.astype(q.dtype), lse


def _visible_range(plan: SummaryPlan, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (first, end), int32 [s] each: queries see positions ``first .. end - 1`` exactly; 0 for padding, which sees none."""
    positions = rank * plan.local + jnp.arange(plan.local, dtype=jnp.int32)
    true = positions < plan.length
    return jnp.where(true, plan.first(positions), 0), jnp.where(true, positions + 1, 0)


def _over_summaries(q: jax.Array, first: jax.Array, summaries: Summaries, plan: SummaryPlan) -> tuple[jax.Array, jax.Array]:
    """Return (out, lse) of this rank's queries. Each query attends to the summaries of all blocks before its ``first``."""
    options = plan.options
    end = first // options.block * options.summaries
    attend = partial(
        attend_block,
        mask=full(),
        extents=jnp.broadcast_to(jnp.stack([jnp.zeros_like(end), end], -1), (*q.shape[:2], 2)),
        scale=options.scale,
        softcap=options.softcap,
        backend=options.backend,
    )
    k, v, fraction = summaries
    if fraction is None:
        out, lse = attend(q, k.astype(q.dtype), v.astype(q.dtype))
        return out, lse + math.log(options.stands_for)
    weight = jnp.broadcast_to(fraction[..., None, None], (*v.shape[:3], 1))
    weighted = jnp.concatenate([v * weight, weight], -1).astype(q.dtype)
    out, lse = attend(q, k.astype(q.dtype), weighted, key_mask=fraction > 0)
    total = out[..., -1:]
    total = jnp.where(total > 0, total, 1)
    return out[..., :-1] / total, lse + jnp.log(total[..., 0]) + math.log(options.stands_for)


def _summaries(inputs: SummaryInputs, plan: SummaryPlan, axis_name: str) -> Summaries:
    """Return the summaries of all blocks that some query sees as summaries, merged from all ranks' partial summaries."""
    _, k, v, pool, key_mask = inputs
    (b, _, g, d), e = k.shape, v.shape[-1]
    m, slots, wide = plan.options.summaries, plan.slots, accumulation_dtype(k.dtype)
    index = jnp.arange(slots * m, dtype=jnp.int32)
    first, end = plan.pooled(index // m, index % m, lax.axis_index(axis_name))
    queries = jnp.zeros((m, g, d), k.dtype) if pool is None else pool.astype(k.dtype)
    pooled = partial(
        attend_block,
        jnp.broadcast_to(jnp.tile(queries, (slots, 1, 1)), (b, slots * m, g, d)),
        k,
        mask=full(),
        extents=jnp.broadcast_to(jnp.stack([first, end], -1), (b, slots * m, 2)),
        key_mask=key_mask,
        backend=plan.options.backend,
    )
    (pooled_k, lse), (pooled_v, _) = pooled(k), pooled(v)  # two calls, since Hopper's kernels take no values wider than keys
    parts = [pooled_k, pooled_v, lse[..., None]]
    if key_mask is not None:
        before = jnp.pad(jnp.cumsum(key_mask, 1, dtype=jnp.int32), ((0, 0), (1, 0)))
        parts.append(jnp.broadcast_to((before[:, end] - before[:, first])[..., None, None].astype(wide), (b, slots * m, g, 1)))
    every = lax.all_gather(jnp.concatenate(parts, -1), axis_name, axis=1, tiled=True)
    blocks, owners = (jnp.arange(n, dtype=jnp.int32) for n in (plan.blocks, plan.owners))
    place, exists = plan.held(blocks[:, None], owners[None])
    held = every.reshape(b, every.shape[1] // m, m, *every.shape[2:])[:, place]
    exists = exists[:, :, None, None]
    pooled_k, pooled_v, lse, count = jnp.split(held, [d, d + e, d + e + 1], -1)
    lse = jnp.where(exists, lse[..., 0], -jnp.inf)
    top = lax.stop_gradient(lse.max(2, keepdims=True))
    z = jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top))
    total = z.sum(2, keepdims=True)
    weight = (z / jnp.where(total == 0, 1, total))[..., None]
    whole = lambda x: (weight * x).sum(2).reshape(b, plan.blocks * m, g, x.shape[-1])
    fraction = None
    if key_mask is not None:
        fraction = jnp.where(exists[..., 0], count[..., 0, 0], 0).sum(2).reshape(b, plan.blocks * m) / plan.options.width
    return Summaries(whole(pooled_k), whole(pooled_v), fraction)


def _plan_call(inputs: SummaryInputs, options: SummaryOptions, ranks: int) -> SummaryPlan:
    q, k, v, pool, _ = inputs
    dtype_names(q, k, v)
    (pool_array,) = describe_arrays({"pool": pool}) or (None,)
    return plan_call({"q": q.shape, "k": k.shape, "v": v.shape}, pool_array, options, ranks)


def run_sharded(inputs: SummaryInputs, options: SummaryOptions, where: ShardedAxes, return_lse: bool = False) -> Any:
    """Compute ``sharded_summary_attention`` from records. Return out, or (out, lse) if ``return_lse`` is True."""
    q, k, v, _, key_mask = inputs
    dtype_names(q, k, v)
    where = where.seen_in(q)
    check_shards(q, k, v, where)
    _plan_call(inputs, options, 1)
    if key_mask is not None:
        check_array(describe_arrays({"key_mask": key_mask})[0], q.shape, k.shape)
    k_specs = where.specs(k.shape[2])
    specs = {name: k_specs[name] for name in ("q", "k", "v", "key_mask")} | {"pool": PartitionSpec(None, *k_specs["k"][2:3])}
    return over_mesh(_attend, (options,), inputs._asdict(), where, specs, return_lse)


def _attend(inputs: dict[str, Any], where: ShardedAxes, options: SummaryOptions) -> tuple[jax.Array, jax.Array]:
    arrays = SummaryInputs(inputs["q"], inputs["k"], inputs["v"], inputs.get("pool"), inputs.get("key_mask"))
    return attention_with_summaries(arrays, options, where.axis_name)
