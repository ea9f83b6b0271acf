"""The strategy "ulysses": an all-to-all inside each group swaps tokens for heads, and keys travel a ring of groups.

    before     each rank holds the tokens of its shard, with all heads
    inside     each rank holds the tokens of all shards of its group, with the heads that ``HeadSplit`` assigns to it
    after      an all-to-all returns results and gradients to the tokens' ranks; results: out, lse, rest (lse's rounding error)

Ulysses is from DeepSpeed (arXiv:2309.14509). Its combination with a ring is from USP (arXiv:2405.07719). The backward swaps
tokens for heads in q, k, v, out, lse, rest and the gradients of out and lse. All ranks of a group get the extents, the key mask
and the key extents of the group's tokens. A rank uses the sinks, the slopes and the dropout head index of its own heads. If
several ranks of a group use one key head, the head's gradients are added in rank order.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.plan.ulysses import HeadSplit

from ...attend.keys import Keys, clip, join, side_by_side
from ...attend.score import Score
from ...attend.state import BackwardInputs, Gradients
from ..step import Ring
from ..transfer import all_gather, exchange, groups_of
from .gather import by_rank, by_shard, in_order, keys_in_order, sum_parts
from .ring import OneWay


class HeadExchange(OneWay):
    """The strategy "ulysses". ``ring.plan.head_split`` assigns the heads to the ranks of a group."""

    def spread(
        self, queries: tuple[jax.Array, ...], keys: Keys, score: Score, ring: Ring
    ) -> tuple[tuple[jax.Array, ...], Keys, Score]:
        """Return the queries, keys and score of all tokens of this rank's group, for the heads that are assigned to this rank."""
        head_split, place = _head_split_of(ring)
        groups = groups_of(head_split.ranks, ring.plan.ranks)
        extents = None if score.extents is None else clip(score.extents)
        to_all = keys.bits, keys.extents, extents
        bits, key_extents, extents = (None if x is None else all_gather(x, ring.axis, groups) for x in to_all)
        kv = keys.kv if head_split.copies == 1 else jnp.repeat(keys.kv, head_split.copies, 2)
        kv, *inside = (exchange(x, 2, 1, ring.axis, groups) for x in (kv, *queries))
        rest = join(Keys(by_rank(kv, head_split.ranks), bits, None, key_extents), keys.kv.shape[1])
        extents = None if extents is None else in_order(side_by_side(extents), ring)
        inside = tuple(in_order(x, ring) for x in inside)
        score = replace(score, extents=extents).of_heads(place * head_split.q_local, head_split.q_local)
        return inside, keys_in_order(rest, ring), score

    def collect(self, results: tuple[jax.Array, ...], ring: Ring) -> tuple[jax.Array, ...]:
        """Return the results of this rank's own tokens, for all heads."""
        return tuple(_collect(results, ring))

    def collect_gradients(
        self, dq: jax.Array, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[jax.Array, Gradients, jax.Array | None]:
        """Return dq and dkv of this rank's own tokens for all heads, and dsinks [heads], with zeros for other ranks' heads.

        Gradients travel in q's dtype, but dkv in at least float32 if several ranks of the group use the same key head.
        """
        assert not isinstance(dkv, tuple), "what travels is packed"
        (head_split, place), dtype = _head_split_of(ring), query.q.dtype
        dq, dkv = _collect((dq.astype(dtype), dkv.astype(dtype) if head_split.copies == 1 else dkv), ring)
        if head_split.copies > 1:
            b, t, heads, width = dkv.shape
            dkv = sum_parts(jnp.moveaxis(dkv.reshape(b, t, heads // head_split.copies, head_split.copies, width), 3, 0))
        dsinks = query.sinks
        if dsinks is not None:  # add zeros for the heads of other ranks
            mine = jnp.arange(head_split.heads) // head_split.q_local == place
            dsinks = jnp.where(mine, jnp.tile(dsinks, head_split.ranks), 0)
        return dq, dkv, dsinks


def _head_split_of(ring: Ring) -> tuple[HeadSplit, jax.Array]:
    head_split = ring.plan.head_split
    assert head_split is not None
    return head_split, lax.axis_index(ring.axis) % head_split.ranks


def _collect(arrays: tuple[jax.Array, ...], ring: Ring) -> list[jax.Array]:
    """Swap heads for tokens: turn [b ranks*n heads/ranks ...], tokens of the group, into [b n heads ...], tokens of this rank."""
    head_split, _ = _head_split_of(ring)
    return [exchange(by_shard(x, ring), 1, 2, ring.axis, groups_of(head_split.ranks, ring.plan.ranks)) for x in arrays]
