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

import torch
from torch import Tensor

from ring_attn_core.plan.ulysses import HeadSplit

from ...attend.keys import Keys, clip, join, side_by_side
from ...attend.score import Score
from ...attend.state import BackwardInputs, Gradients
from ..groups import rank_in
from ..step import Ring
from ..transfer import exchange
from .gather import by_rank, by_shard, in_order, keys_in_order, sum_parts
from .ring import OneWay


class HeadExchange(OneWay):
    """The strategy "ulysses". ``ring.plan.head_split`` assigns the heads to the ranks of a group."""

    def spread(self, queries: tuple[Tensor, ...], keys: Keys, score: Score, ring: Ring) -> tuple[tuple[Tensor, ...], Keys, Score]:
        head_split, place = _head_split_of(ring)
        extents = None if score.extents is None else clip(score.extents)
        to_all = [None if x is None else x.expand(head_split.ranks, *x.shape) for x in (keys.bits, keys.extents, extents)]
        kv = keys.kv if head_split.copies == 1 else keys.kv.repeat_interleave(head_split.copies, 2)
        by_head = [x.unflatten(2, (head_split.ranks, x.shape[2] // head_split.ranks)).movedim(2, 0) for x in (kv, *queries)]
        arrived = exchange((*by_head, *to_all), rank_in(ring.group) - place, ring.group).wait()
        kv, *inside, bits, key_extents, extents = arrived
        keys = keys_in_order(join(Keys(kv, bits, None, key_extents), keys.kv.shape[1]), ring)
        inside = [in_order(side_by_side(x), ring) for x in inside]
        extents = None if extents is None else in_order(side_by_side(extents), ring)
        score = score._replace(extents=extents).of_heads(place * head_split.q_local, head_split.q_local)
        return tuple(inside), keys, score

    def collect(self, results: tuple[Tensor, ...], ring: Ring) -> tuple[Tensor, ...]:
        return _collect(results, ring)

    def collect_gradients(
        self, dq: Tensor, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        """Return dq and dkv of this rank's own tokens for all heads, and dsinks [heads], with zeros for other ranks' heads. All
        travel in q's dtype, but dkv in at least float32 if several ranks use the same key head, whose gradients are added
        afterwards."""
        assert isinstance(dkv, Tensor), "what travels is packed"
        (head_split, place), dtype = _head_split_of(ring), query.q.dtype
        dq, dkv = _collect((dq.to(dtype), dkv.to(dtype) if head_split.copies == 1 else dkv), ring)
        if head_split.copies > 1:
            dkv = sum_parts(dkv.unflatten(2, (head_split.kv_heads, head_split.copies)).movedim(3, 0).contiguous())
        if query.sinks is None:
            return dq, dkv, None
        zeros = place * head_split.q_local, (head_split.ranks - place - 1) * head_split.q_local  # for the heads of other ranks
        return dq, dkv, torch.nn.functional.pad(query.sinks, zeros)


def _head_split_of(ring: Ring) -> tuple[HeadSplit, int]:
    head_split = ring.plan.head_split
    assert head_split is not None
    return head_split, rank_in(ring.group) % head_split.ranks


def _collect(arrays: tuple[Tensor, ...], ring: Ring) -> tuple[Tensor, ...]:
    """Swap heads for tokens: turn [b ranks*n heads/ranks ...], tokens of the group, into [b n heads ...], tokens of this rank."""
    head_split, place = _head_split_of(ring)
    sent = tuple(by_rank(by_shard(x, ring), head_split.ranks) for x in arrays)
    arrived = exchange(sent, rank_in(ring.group) - place, ring.group).wait()
    return tuple([x.movedim(0, 2).flatten(2, 3) for x in arrived])
