"""Dilated attention: one ring attention per pattern, which is a segment length and a dilation.

The results of the patterns are averaged, weighted by their softmax denominators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import causal
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band
from ring_attn_core.variants.dilated import FoldedBatches, Patterns, batches_of, places_of

from ..axes import ring_size, vary_alike
from ..call.autograd import attention, reverse_only
from ..call.prepare import Arrays, problem_of
from .folded_batches import fold_shard, mix

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


@named_keywords
def dilated_attention(
    q: Float[Array, "batch seq_local heads head_dim"],
    k: Float[Array, "batch seq_local kv_heads head_dim"],
    v: Float[Array, "batch seq_local kv_heads v_dim"],
    *,
    segments: tuple[int, ...],
    dilations: tuple[int, ...],
    axis_name: str = "seq",
    mixing: str = "softmax",
    mask: Band = causal(),
    key_mask: Bool[Array, "batch seq_local"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    length: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute dilated attention of LongNet (Ding et al., arXiv:2307.02486) over a ring, forward and backward.

    Pattern i splits the sequence into segments of ``w = segments[i]`` tokens; the last segment may be shorter. In each segment,
    with ``r = dilations[i]``, head h keeps the tokens at offsets ``h % r``, ``h % r + r``, and so on. Kept tokens of a segment
    attend to each other:

        Z_i = sum_j exp(s_j),    out_i = sum_j exp(s_j) v_j / Z_i        over the keys j that pattern i lets the query see
        out = sum_i Z_i out_i / sum_i Z_i,    lse = log sum_i Z_i        over the patterns whose kept tokens include the query

    A key that a query sees in two patterns counts twice. Each pattern is one exact ring attention over the tokens that it keeps.
    Under the strategy "ring", keys travel no farther than a segment reaches.

    Arguments (arrays are this rank's shards in contiguous layout: rank R holds tokens R s to (R + 1) s - 1):
        q: ``[batch, s, heads, head_dim]``; k: ``[batch, s, kv_heads, head_dim]``; v: ``[batch, s, kv_heads, v_dim]``; dtypes and
            heads as in ``ring_attention``.
        segments: lengths in tokens, strictly increasing. They need not divide the sequence, and may be longer than it.
        dilations: one for each segment; it divides the segment's length.
        axis_name: the mesh axis of the ring; call inside ``jax.shard_map`` over it, or use ``sharded_dilated_attention``.
        mixing: "softmax": every head uses all patterns, as above. "heads": of the n patterns, head h uses only pattern
            ``h n // heads``.
        mask: ``causal()``, ``full()`` or ``sliding_window(before, after)`` in global positions; it applies inside each segment.
        key_mask: bool ``[batch, s]``, True where a key may be attended.
        scale, softcap, strategy, backend, deterministic: as in ``ring_attention``.
        length: global number of tokens without padding. Padding keys are masked; padding queries have out 0. None: no padding.
        return_lse: also return lse.

    Returns ``out [batch, s, heads, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse [batch, s, heads]`` in at least
    float32, natural log, differentiable. A query that no pattern keeps, or that sees no key, has out 0, lse -inf, gradient 0.

    Raise ValueError at trace time if segments and dilations differ in number, segments do not increase, or a dilation does not
    divide its segment. Raise it too if mixing is "heads" and there are more patterns than heads, if q and k differ in length, or
    if ``ring_attention`` would refuse an argument.
    """
    options = Options(
        layout="contiguous",
        mask=mask,
        length=length,
        scale=scale,
        softcap=softcap,
        strategy=strategy,
        backend=backend,
        deterministic=deterministic,
    )
    out, lse = attend(q, k, v, key_mask, Patterns(segments, dilations, mixing), options, axis_name)
    return (out, lse) if return_lse else out


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_mask: jax.Array | None,
    patterns: Patterns,
    options: Options,
    axis_name: str,
) -> tuple[jax.Array, jax.Array]:
    batches = batches_of(problem_of(q, k, v, Arrays(key_mask=key_mask), ring_size(axis_name), options), patterns)
    q, k, v, key_mask = reverse_only(*vary_alike((axis_name,), q, k, v, key_mask))
    rank = lax.axis_index(axis_name)
    queries, keys = places_of(batches)
    outs, lses = [], []
    batched = fold_shard(q, queries, rank), fold_shard(k, keys, rank), fold_shard(v, keys, rank)
    for each, q_of, k_of, v_of in zip(batches, *batched, strict=True):
        out, lse = attention(q_of, k_of, v_of, _arrays(each, key_mask, q, rank), each.options(options), axis_name)
        outs.append(out)
        lses.append(lse)
    return mix(outs, lses, queries, rank)


def _arrays(batches: FoldedBatches, key_mask: jax.Array | None, q: jax.Array, rank: jax.Array) -> Arrays:
    """Return a pattern's extents [b * head_groups, slots, 2] and key mask [b * head_groups, slots], each None if not needed."""
    if not batches.needs_extents and key_mask is None:
        return Arrays()
    b, rows = q.shape[0], q.shape[0] * batches.head_groups
    slot, group = jnp.arange(batches.slots, dtype=jnp.int32)[None], jnp.arange(batches.head_groups, dtype=jnp.int32)[:, None]
    holds, first, end = batches.visible(rank, slot, group)
    extents = jnp.broadcast_to(jnp.stack((first, end), -1), (b, batches.head_groups, batches.slots, 2)).reshape(
        rows, batches.slots, 2
    )
    folded_mask = None
    if key_mask is not None:
        most = batches.dilation - 1
        padded = jnp.pad(key_mask, ((0, 0), (most, batches.spanned - batches.local)))
        padded = lax.dynamic_slice_in_dim(padded, most - batches.front(rank), batches.spanned, 1)
        batch_mask = padded.reshape(b, batches.slots, batches.dilation)[:, :, : batches.head_groups].transpose(0, 2, 1)
        folded_mask = (batch_mask & holds[None]).reshape(rows, batches.slots)
    elif batches.needs_key_mask:
        folded_mask = jnp.broadcast_to(holds, (b, batches.head_groups, batches.slots)).reshape(rows, batches.slots)
    return Arrays(extents=extents if batches.needs_extents else None, key_mask=folded_mask)
